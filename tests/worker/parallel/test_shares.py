"""How a model is divided: every head, column and token is somewhere, as evenly as can be."""

import random
from dataclasses import replace

import pytest

from proto.errors import ConfigError
from worker.models.spec import DefaultRope, ModelSpec
from worker.parallel.shares import deal, divide

SMOLLM2 = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    norm_eps=1e-5,
    ropes=(DefaultRope(1e5),) * 30,
    windows=(None,) * 30,
    attention_scale=0.125,
)


def test_query_heads_follow_kv_heads_dealt_unevenly() -> None:
    first, second = divide(SMOLLM2, 2, (64,))
    assert (first.kv_heads, first.heads) == (range(2), range(6))
    assert (second.kv_heads, second.heads) == (range(2, 3), range(6, 9))
    assert (first.inner, second.inner) == (range(768), range(768, 1536))
    assert (first.vocab, second.vocab) == (range(24576), range(24576, 49152))
    spec = second.spec(SMOLLM2)
    assert (spec.num_heads, spec.num_kv_heads, spec.intermediate_size) == (3, 1, 768)
    assert (spec.vocab_size, spec.head_dim) == (49152, 64)


def test_kv_heads_are_replicated_only_when_there_are_more_ranks() -> None:
    shares = divide(replace(SMOLLM2, num_heads=12, num_kv_heads=2), 5)
    assert [list(share.kv_heads) for share in shares] == [[0], [0], [0], [1], [1]]
    assert [len(share.heads) for share in shares] == [2, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("units", "sizes"),
    [
        ((256, 64), [768, 768]),
        ((512, 64), [1024, 512]),
        ((1024, 64), [768, 768]),
        ((1536, 7), [768, 768]),
    ],
)
def test_blocks_of_inner_columns_stay_whole_where_they_can(
    units: tuple[int, ...], sizes: list[int]
) -> None:
    assert [len(share.inner) for share in divide(SMOLLM2, 2, units)] == sizes


@pytest.mark.parametrize(("kv_heads", "size"), [(3, 10), (1, 10), (2, 8)])
def test_more_ranks_than_query_heads_are_refused(kv_heads: int, size: int) -> None:
    heads = 9 if kv_heads != 2 else 6
    spec = replace(SMOLLM2, num_heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}"):
        divide(spec, size)


def test_every_part_of_random_models_is_somewhere_and_evenly_dealt() -> None:
    draw = random.Random(5)
    for _ in range(300):
        kv_heads, queries = draw.randint(1, 9), draw.randint(1, 6)
        spec = replace(
            SMOLLM2,
            num_kv_heads=kv_heads,
            num_heads=kv_heads * queries,
            intermediate_size=draw.randint(64, 300),
            vocab_size=draw.randint(64, 300),
        )
        size = draw.randint(1, kv_heads * queries)
        if size > kv_heads and -(-size // kv_heads) > queries:
            continue
        shares = divide(spec, size, (draw.choice([1, 4, 32]), 8))
        for part, count in (
            ("heads", spec.num_heads),
            ("inner", spec.intermediate_size),
            ("vocab", spec.vocab_size),
        ):
            pieces = [getattr(share, part) for share in shares]
            assert [each for piece in pieces for each in piece] == list(range(count))
            assert all(len(piece) for piece in pieces)
        for share in shares:
            assert {head // queries for head in share.heads} == set(share.kv_heads)
        held = [len(share.kv_heads) for share in shares]
        assert max(held) - min(held) <= 1
        assert sum(held) == max(kv_heads, size)


def test_what_is_dealt() -> None:
    assert deal(7, 3) == [range(3), range(3, 5), range(5, 7)]
