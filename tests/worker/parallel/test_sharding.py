"""Sharding: every head, column and token is on a rank, as evenly as possible."""

import random
from dataclasses import replace
from typing import Any

import pytest

from proto.errors import ConfigError
from worker.models.attention import AttentionSpec
from worker.models.mlp import MlpSpec
from worker.models.parts import divide_evenly
from worker.models.rope import DefaultRope
from worker.models.sharding import ModelShard, shard_model
from worker.models.spec import LayerSpec, ModelSpec

ATTENTION = AttentionSpec(
    hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, rope=DefaultRope(1e5)
)
MLP = MlpSpec(hidden_size=576, intermediate_size=1536)


def model(mlp: MlpSpec = MLP, vocab_size: int = 49152, **attention: Any) -> ModelSpec:
    """SmolLM2 with another MLP or vocabulary."""
    layer = LayerSpec(mixer=replace(ATTENTION, **attention), mlp=mlp)
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=576,
        max_position=8192,
        norm_eps=1e-5,
        layers=(layer,) * 3,
    )


def rows(shard: ModelShard, name: str, unit: int) -> range:
    """Heads or columns of a weight of layer 1 that the rank holds."""
    held = shard.weights[f"layers.1.{name}"].rows
    return range(held.start // unit, held.stop // unit)


def inner_size(shard: ModelShard) -> int:
    mlp = shard.spec.layers[0].mlp
    assert isinstance(mlp, MlpSpec)
    return mlp.intermediate_size


def test_query_heads_follow_unevenly_distributed_kv_heads() -> None:
    first, second = shard_model(model(), 2)
    assert (rows(first, "k.weight", 64), rows(first, "q.bias", 64)) == (range(2), range(6))
    assert (rows(second, "v.weight", 64), rows(second, "q.weight", 64)) == (
        range(2, 3),
        range(6, 9),
    )
    assert second.weights["layers.2.o.weight"].columns == slice(6 * 64, 9 * 64)
    assert "layers.2.o.bias" not in second.weights
    assert (rows(first, "gate.weight", 1), rows(second, "up.weight", 1)) == (
        range(768),
        range(768, 1536),
    )
    assert second.weights["layers.0.down.weight"].columns == slice(768, 1536)
    assert (first.vocab, second.vocab) == (range(24576), range(24576, 49152))
    assert second.weights["head.weight"].rows == slice(24576, 49152)
    shape = second.spec.attention_shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (3, 1, 64)
    assert (inner_size(second), second.spec.vocab_size) == (768, 49152)


def test_kv_heads_are_replicated_only_when_there_are_more_ranks() -> None:
    shards = shard_model(model(num_heads=12, num_kv_heads=2), 5)
    assert [list(rows(shard, "k.weight", 64)) for shard in shards] == [[0], [0], [0], [1], [1]]
    assert [shard.spec.attention_shape.num_heads for shard in shards] == [2, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("block", "inner", "sizes"),
    [
        (256, 1536, [768, 768]),
        (512, 1536, [1024, 512]),
        (1024, 1536, [768, 768]),
        (1, 96, [64, 32]),
        (1, 100, [50, 50]),
    ],
)
def test_blocks_of_inner_columns_stay_whole_where_they_can(
    block: int, inner: int, sizes: list[int]
) -> None:
    spec = model(replace(MLP, intermediate_size=inner))
    shards = shard_model(spec, 2, {"down.weight": block})
    assert [inner_size(shard) for shard in shards] == sizes


@pytest.mark.parametrize(("kv_heads", "size"), [(3, 10), (1, 10), (2, 8)])
def test_more_ranks_than_query_heads_are_refused(kv_heads: int, size: int) -> None:
    heads = 9 if kv_heads != 2 else 6
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}"):
        shard_model(model(num_heads=heads, num_kv_heads=kv_heads), size)


def test_random_models_are_sharded_completely_and_evenly() -> None:
    draw = random.Random(5)
    for _ in range(300):
        kv_heads, queries = draw.randint(1, 9), draw.randint(1, 6)
        inner, vocab = draw.randint(64, 300), draw.randint(64, 300)
        spec = model(
            replace(MLP, intermediate_size=inner),
            vocab,
            num_kv_heads=kv_heads,
            num_heads=kv_heads * queries,
        )
        size = draw.randint(1, kv_heads * queries)
        if size > kv_heads and -(-size // kv_heads) > queries:
            continue
        shards = shard_model(spec, size, {"down.weight": draw.choice([1, 4, 32])})
        for name, unit, count in (
            ("q.weight", 64, kv_heads * queries),
            ("gate.weight", 1, inner),
        ):
            held = [rows(shard, name, unit) for shard in shards]
            assert [index for part in held for index in part] == list(range(count))
            assert all(len(part) for part in held)
        assert [token for shard in shards for token in shard.vocab] == list(range(vocab))
        for shard in shards:
            heads = rows(shard, "q.weight", 64)
            assert {head // queries for head in heads} == set(rows(shard, "k.weight", 64))
        held_kv = [len(rows(shard, "k.weight", 64)) for shard in shards]
        assert max(held_kv) - min(held_kv) <= 1
        assert sum(held_kv) == max(kv_heads, size)


def test_uneven_ranges_are_longer_first() -> None:
    assert divide_evenly(7, 3) == [range(3), range(3, 5), range(5, 7)]
