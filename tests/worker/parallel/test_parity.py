"""Several ranks compute the results of one: tiny models of every family, from real files."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention, logits_in_chunks
from tests.fakes.devices import CPU
from tests.fakes.gguf_models import packed, prepared_gguf
from tests.fakes.prepared_models import prepare_checkpoint, prepared_file, spec_of
from tests.fakes.ranks import Ranks
from tests.fakes.tiny_checkpoints import CONFIGS, MIXTURES, save_tiny
from tests.fakes.tiny_families import save_gguf
from tests.fakes.tiny_ggufs import SIZES
from worker.cpu.formats import Int8Format, MixedFormat, PackedFormat, RotatedFormat
from worker.cpu.kernels import Kernels
from worker.loader.block_types import BLOCK_TYPES
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.sharding import shard_model
from worker.models.spec import ModelSpec
from worker.parallel.group import RankGroup

TOKENS = torch.randint(0, 60, (30,), generator=torch.Generator().manual_seed(7))
NEAR = 3e-4
"""Of float32 sums in another order: of qwen35moe, two chunk sizes of one rank differ by 9e-5."""


def load(
    prepared: PreparedModel,
    group: RankGroup,
    form: WeightFormat | None = None,
    dtype: torch.dtype = torch.float32,
    spec: ModelSpec | None = None,
) -> Decoder:
    spec = spec or spec_of(prepared)
    return load_model(prepared, spec, dtype, CPU, lambda fraction: None, form, group)


def logits(decoder: Decoder, *sizes: int) -> torch.Tensor:
    """Logits of all tokens, computed this many at a time."""
    return logits_in_chunks(decoder, TOKENS, *sizes)


def assert_equals_one_rank(
    prepared: PreparedModel,
    size: int,
    dtype: torch.dtype = torch.float32,
    tolerance: float = NEAR,
    spec: ModelSpec | None = None,
) -> None:
    """The logits of `size` ranks are close to those of one, and bit-identical on every rank.

    spec: of the ranks, if it is not that of the prepared model.
    """
    expected = logits(load(prepared, RankGroup(), dtype=dtype), 17, 1, 12)
    assert expected.std() > 0.5, "a difference would not be visible"
    with Ranks(size) as ranks:
        decoders = [load(prepared, group, dtype=dtype, spec=spec) for group in ranks.groups]
        found = ranks.run_on_all(lambda rank: logits(decoders[rank], 17, 1, 12))
    assert (found[0] - expected).abs().max() < tolerance
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_compute_the_logits_of_one(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    assert_equals_one_rank(prepare_checkpoint(tmp_path, tmp_path / "prepared"), 2)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied-yarn", "gemma3-pattern-untied"])
def test_more_ranks_than_kv_heads(name: str, size: int, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    assert_equals_one_rank(prepare_checkpoint(tmp_path, tmp_path / "prepared"), size)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in MIXTURES),
        *((name, 3) for name in ("mixtral", "qwen2moe", "qwen3moe-dense-layers", "gptoss")),
    ],
)
def test_ranks_with_whole_experts(name: str, size: int, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    spec = spec_of(prepared).with_expert_parallel()
    assert_equals_one_rank(prepared, size, spec=spec)
    with pytest.raises(ConfigError, match="at most"):
        shard_model(spec, 9)


@pytest.mark.parametrize("is_expert_parallel", [False, True])
def test_ranks_share_a_mixture_in_blocks(
    is_expert_parallel: bool, tmp_path: Path, kernels: Kernels
) -> None:
    """The kernel computes each rank's experts."""
    save_tiny("qwen2moe", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    spec = spec_of(prepared)

    def blocks() -> WeightFormat:
        return Int8Format(kernels, DenseFormat(torch.float32), torch.float32)

    expected = logits(load(prepared, RankGroup(), blocks()), 17, 1, 12)
    if is_expert_parallel:
        spec = spec.with_expert_parallel()
    with Ranks(2) as ranks:
        decoders = [load(prepared, group, blocks(), spec=spec) for group in ranks.groups]
        found = ranks.run_on_all(lambda rank: logits(decoders[rank], 17, 1, 12))
    assert (found[0] - expected).abs().max() < 0.02 * expected.std()
    assert torch.equal(found[0], found[1])


def test_a_model_without_experts_has_none_to_deal_out(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    spec = spec_of(prepare_checkpoint(tmp_path, tmp_path / "prepared"))
    with pytest.raises(ConfigError, match="--enable-expert-parallel: LlamaForCausalLM has no"):
        spec.with_expert_parallel()


def test_bfloat16_sums_are_rounded_once(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    assert_equals_one_rank(prepared, 2, torch.bfloat16, tolerance=0.15)


def assert_no_larger_error(
    found: torch.Tensor, one_rank: torch.Tensor, exact: torch.Tensor
) -> None:
    """Roundings of activations differ between ranks; their mean error must not be larger.

    exact: logits of dense weights with the same values.
    """
    assert exact.std() > 0.3, "a difference would not be visible"
    error = (one_rank - exact).abs().mean()
    assert 0 < error < 0.1 * exact.std()
    assert (found - exact).abs().mean() < 1.3 * error


def uneven(kv_heads: int = 3) -> LlamaConfig:
    """Heads as in SmolLM2, sized so that cuts between heads are cuts between blocks of 32."""
    sizes = {
        "hidden_size": 288,
        "intermediate_size": 512,
        "num_attention_heads": 9,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
    }
    return LlamaConfig(**SIZES | sizes)


def test_ranks_hold_their_shard_of_a_files_blocks(kernels: Kernels, tmp_path: Path) -> None:
    """Rows are permuted and columns split between blocks; no weight becomes dense."""
    prepared = prepared_gguf(tmp_path, "Q4_1", uneven())

    def form() -> PackedFormat:
        return PackedFormat(kernels, DenseFormat(torch.float32), torch.float32)

    whole = form()
    expected = logits(load(prepared, RankGroup(), whole), 30)
    with Ranks(2) as ranks:
        forms = [form() for _ in ranks.groups]
        decoders = [load(prepared, *each) for each in zip(ranks.groups, forms, strict=True)]
        found = ranks.run_on_all(lambda rank: logits(decoders[rank], 30))
    assert_no_larger_error(found[0], expected, logits(load(prepared, RankGroup()), 30))
    assert torch.equal(*found)
    assert [decoder.spec.attention_shape.num_kv_heads for decoder in decoders] == [2, 1]
    assert [each.dense_names for each in forms] == [[], []]
    held = [each.memory["packed"] for each in forms]
    assert sum(held) == pytest.approx(whole.memory["packed"], rel=0.1)
    assert max(held) <= 0.6 * whole.memory["packed"]


@pytest.mark.parametrize(("value_size", "are_dense"), [(16, False), (8, True)])
def test_ranks_hold_parts_of_a_files_blocks(
    value_size: int, are_dense: bool, kernels: Kernels, tmp_path: Path
) -> None:
    """The value heads that read two key heads are three parts of rows and of columns.

    The columns of two heads of 16 are a block; of two heads of 8 they are half of one.
    """
    sizes = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "linear_value_head_dim": value_size,
        "intermediate_size": 128,
    }
    path, _ = save_gguf("Qwen3_5ForCausalLM", tmp_path, "Q8_0", **sizes)
    prepared = prepared_file(path)
    assert_equals_one_rank(prepared, 2)
    assert_equals_one_rank(prepared, 3)
    one_rank = logits(load(prepared, RankGroup(), packed(kernels)), 30)
    with Ranks(2) as ranks:
        forms = [packed(kernels) for _ in ranks.groups]
        decoders = [load(prepared, *each) for each in zip(ranks.groups, forms, strict=True)]
        found = ranks.run_on_all(lambda rank: logits(decoders[rank], 30))
    names = [f"layers.{layer}.out.weight (Q8_0)" for layer in (0, 1, 2, 4)]
    assert [sorted(each.dense_names) for each in forms] == [names if are_dense else []] * 2
    assert torch.equal(*found)
    exact = logits(load(prepared, RankGroup()), 30)
    error, of_one = ((each - exact).abs().mean() for each in (found[0], one_rank))
    assert 0 < of_one < 0.3 * exact.std()
    assert error < 2 * of_one


@pytest.mark.parametrize("is_expert_parallel", [False, True])
def test_ranks_with_experts_of_a_file_round_no_more_than_one(
    is_expert_parallel: bool, kernels: Kernels, tmp_path: Path
) -> None:
    """Sums of ranks have another order, so roundings to 8 bits differ; errors are no larger."""
    config = MixtralConfig(
        **SIZES | {"intermediate_size": 512}, num_local_experts=4, num_experts_per_tok=2
    )
    prepared = prepared_gguf(tmp_path, "Q4_K", config)
    spec = spec_of(prepared)

    def form() -> PackedFormat:
        return PackedFormat(kernels, DenseFormat(torch.float32), torch.float32)

    one_rank = logits(load(prepared, RankGroup(), form()), 30)
    if is_expert_parallel:
        spec = spec.with_expert_parallel()
    with Ranks(2) as ranks:
        decoders = [load(prepared, group, form(), spec=spec) for group in ranks.groups]
        found = ranks.run_on_all(lambda rank: logits(decoders[rank], 30))
    assert torch.equal(*found)
    assert not torch.equal(found[0], one_rank)
    assert_no_larger_error(found[0], one_rank, logits(load(prepared, RankGroup()), 30))


@pytest.mark.parametrize("kind", [*(each for each in BLOCK_TYPES if each[-1] == "K"), "IQ2_XXS"])
def test_weights_whose_blocks_cross_head_boundaries_are_dense(
    kind: str, kernels: Kernels, tmp_path: Path
) -> None:
    """The MLP's inner columns are cut between blocks instead: two of 256 on either side."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    prepared = prepared_gguf(tmp_path, kind, LlamaConfig(**SIZES | sizes))

    def form() -> PackedFormat:
        return PackedFormat(kernels, DenseFormat(torch.float32), torch.float32)

    expected = logits(load(prepared, RankGroup(), form()), 30)
    with Ranks(2) as ranks:
        forms = [form() for _ in ranks.groups]
        decoders = [load(prepared, *each) for each in zip(ranks.groups, forms, strict=True)]
        found = ranks.run_on_all(lambda rank: logits(decoders[rank], 30))
    names = [f"layers.{layer}.o.weight ({kind})" for layer in range(2)]
    assert [sorted(each.dense_names) for each in forms] == [names, names]
    assert_no_larger_error(found[0], expected, logits(load(prepared, RankGroup()), 30))


@pytest.mark.parametrize("kind", ["new", "rotated", "mixed"])
def test_every_format_is_close_to_its_result_on_one_rank(
    kind: str, kernels: Kernels, tmp_path: Path
) -> None:
    dtype = torch.float32
    prepared = prepared_gguf(tmp_path, "Q8_0" if kind == "mixed" else "F32", uneven())

    def form() -> WeightFormat:
        dense = DenseFormat(dtype)
        blocks = PackedFormat(kernels, dense, dtype)
        new = Int8Format(kernels, dense, dtype)
        match kind:
            case "new":
                return new
            case "rotated":
                return RotatedFormat(new, dense, kernels)
        return MixedFormat(blocks, kernels)

    expected = logits(load(prepared, RankGroup(), form(), dtype), 20, 1, 9)
    with Ranks(2) as ranks:
        forms = [form() for _ in ranks.groups]
        decoders = [load(prepared, *each, dtype) for each in zip(ranks.groups, forms, strict=True)]
        found = ranks.run_on_all(lambda rank: logits(decoders[rank], 20, 1, 9))
    assert torch.equal(*found)
    assert [each.dense_names for each in forms] == [[], []]
    assert_no_larger_error(found[0], expected, logits(load(prepared, RankGroup()), 30))


def test_a_token_outside_the_vocabulary_is_refused_by_every_rank(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    with Ranks(2) as ranks:
        for group in ranks.groups:
            decoder = load(prepared, group)
            first = torch.zeros(1, dtype=torch.int64)
            for token in (-1, 96):
                with pytest.raises(IndexError, match=f"row {token} of 96"):
                    decoder.forward(torch.tensor([token]), first, DenseAttention(decoder.spec))
