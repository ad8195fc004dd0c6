"""GGUF types against the gguf package, tensor by tensor and through a whole model."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)

from deploy.models import gguf_config, gguf_file
from deploy.models.gguf_header import GgufHeader
from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel, TensorEntry, TensorIndex
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.gguf_files import PLAIN, QUANTISED, numbers, random_rows, write
from tests.fakes.prepared_models import gguf_index, prepare, spec_of
from tests.fakes.ranks import Ranks
from tests.fakes.tiny_ggufs import SIZES, Tensors, config_of, tiny
from worker.cpu.formats import PackedFormat
from worker.cpu.kernels import Kernels
from worker.loader.block_types import BLOCK_TYPES
from worker.loader.dequantize import HALF_SCALES
from worker.loader.files import decode_gguf
from worker.loader.formats import DenseFormat
from worker.loader.weights import create_builder, load_model
from worker.models.rope import DefaultRope, Llama3Rope
from worker.models.rotary import inverse_frequencies

TOKENS = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(3))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("kind", [*PLAIN, *QUANTISED])
def test_tensors_of_every_block_type_are_dequantised(kind: str) -> None:
    rows = random_rows(kind, 37, 512, seed=1)
    entry = TensorEntry("t", kind, (37, 512), 0, 0, rows.nbytes)
    tensor = decode_gguf(entry, rows.reshape(-1))
    assert tensor.shape == (37, 512)
    assert tensor.abs().max() > 0.01
    np.testing.assert_array_equal(tensor.float().numpy(), numbers(kind, rows))


def logits_from_file(folder: Path, config: dict[str, Any], tensors: Tensors) -> torch.Tensor:
    write(folder / "model.gguf", tensors)
    return logits_of(prepare(folder / "prepared", config, gguf_index(folder / "model.gguf")))


def logits_of(prepared: PreparedModel) -> torch.Tensor:
    spec = spec_of(prepared)
    decoder = load_model(prepared, spec, torch.float32, CPU, lambda fraction: None)
    attention = DenseAttention(spec)
    return decoder.float32_logits(decoder.forward(TOKENS, torch.arange(30), attention))


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.3, "a difference would not be visible"
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", [*PLAIN, *QUANTISED])
def test_a_llama_of_every_block_type(kind: str, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    with torch.no_grad():
        model, tensors = tiny(kind, config, permuted=True)
        expected = model(TOKENS[None]).logits[0]
    assert_close(logits_from_file(tmp_path, config_of(config), tensors), expected)


@pytest.mark.parametrize(
    ("config", "permuted"),
    [(LlamaConfig(**SIZES, attention_bias=True), True), (Qwen2Config(**SIZES), False)],
)
def test_biases_are_permuted_for_llama_only(
    config: PretrainedConfig, permuted: bool, tmp_path: Path
) -> None:
    with torch.no_grad():
        model, tensors = tiny("F32", config, permuted)
        expected = model(TOKENS[None]).logits[0]
    assert_close(logits_from_file(tmp_path, config_of(config), tensors), expected)


def test_gemma3_norm_weights_include_the_added_one(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=9, sliding_window_pattern=2)
    with torch.no_grad():
        model, tensors = tiny("F32", config, permuted=False)
        expected = model(TOKENS[None]).logits[0]
    assert_close(logits_from_file(tmp_path, config_of(config), tensors), expected)


def test_a_file_with_the_factors_of_longrope(tmp_path: Path) -> None:
    """The factors are tensors, and become part of the configuration."""
    factors = [1.0 + pair for pair in range(24)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 24,
        "long_factor": factors,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 16,
    }
    config = Phi3Config(
        **SIZES,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        original_max_position_embeddings=16,
        pad_token_id=0,
    )
    with torch.no_grad():
        model, tensors = tiny("F32", config, permuted=True)
        expected = model(TOKENS[None]).logits[0]
    for name, divisors in (("long", factors), ("short", [1.0] * 24)):
        tensors[f"rope_factors_{name}.weight"] = ("F32", np.array(divisors, np.float32))
    path = tmp_path / "model.gguf"
    write(path, tensors)
    own = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 0,
        "rope.dimension_count": 48,
        "rope.scaling.attn_factor": 1.25,
        "rope.scaling.original_context_length": 16,
        "vocab_size": config.vocab_size,
    }
    index = gguf_index(path)
    values = {f"phi3.{key}": value for key, value in own.items()}
    header = GgufHeader({"general.architecture": "phi3", **values}, index.tensors)
    converted = gguf_config.convert(str(path), header)
    weights = gguf_file._without_rope_factors([str(path)], header, converted)
    index = TensorIndex("gguf", index.files, weights)
    assert_close(logits_of(prepare(tmp_path / "prepared", converted, index)), expected)


def test_rope_factors_are_refused_with_two_ropes(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=9, sliding_window_pattern=2)
    with torch.no_grad():
        _, tensors = tiny("F32", config, permuted=False)
    tensors["rope_freqs.weight"] = ("F32", np.ones(32, dtype=np.float32))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight does not say which"):
        logits_from_file(tmp_path, config_of(config), tensors)


def test_rope_factors_of_the_file_divide_the_frequencies(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, rope_parameters=LLAMA3)
    with torch.no_grad():
        model, tensors = tiny("F32", config, permuted=True)
        expected = model(TOKENS[None]).logits[0]
    scaled, _ = inverse_frequencies(Llama3Rope(1000.0, 4.0, 1.0, 4.0, 32), 64)
    plain, _ = inverse_frequencies(DefaultRope(1000.0), 64)
    tensors["rope_freqs.weight"] = ("F32", (plain / scaled).numpy())
    unscaled = config_of(config) | {"rope_parameters": {"rope_theta": 1000.0}}
    assert_close(logits_from_file(tmp_path, unscaled, tensors), expected)
    linear = {"rope_theta": 1000.0, "rope_type": "linear", "factor": 2.0}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.*LinearRope"):
        logits_from_file(tmp_path, unscaled | {"rope_parameters": linear}, tensors)


def with_scales(folder: Path, tensors: Tensors) -> TensorIndex:
    """Write the tensors, and return them as a model that is prepared has them."""
    folder.mkdir()
    path = folder / "model.gguf"
    write(path, tensors)
    return TensorIndex(
        "gguf", (str(path),), gguf_file._with_scales([str(path)], gguf_index(path).tensors)
    )


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES | {"tie_word_embeddings": False}),
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=["dense", "experts"],
)
def test_scales_beside_weights_in_nvfp4_multiply_them(
    config: PretrainedConfig, tmp_path: Path, kernels: Kernels
) -> None:
    """One of a tensor, or one of each expert in it, on one rank and on two.

    Scales of inputs are not needed.
    """
    with torch.no_grad():
        _, tensors = tiny("NVFP4", config, permuted=True)
    scaled, plain = dict(tensors), dict(tensors)
    for seed, (name, (kind, rows)) in enumerate(tensors.items()):
        if kind != "NVFP4":
            continue
        if name != "token_embd.weight":
            count = rows.shape[0] if rows.ndim == 3 else 1
            scales = np.random.default_rng(seed).uniform(0.5, 1.5, count).astype(np.float32)
            base = name.removesuffix(".weight")
            scaled[base + ".scale"] = scaled[base + ".input_scale"] = ("F32", scales)
            values = numbers(kind, rows) * scales.reshape(-1, *(1,) * (rows.ndim - 1))
            plain[name] = ("F32", values.astype(np.float32))
    index = with_scales(tmp_path / "scaled", scaled)
    prepared = prepare(tmp_path / "prepared scaled", config_of(config), index)
    expected = logits_from_file(tmp_path, config_of(config), plain)
    assert_close(logits_of(prepared), expected)
    dtype, cpu = torch.float32, CPU
    form = PackedFormat(kernels, DenseFormat(dtype), dtype)
    spec = spec_of(prepared)
    decoder = load_model(prepared, spec, dtype, cpu, lambda _: None, form)
    attention, positions = DenseAttention(spec), torch.arange(len(TOKENS))
    found = decoder.float32_logits(decoder.forward(TOKENS, positions, attention))
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert form.dense_names == []
    assert list(form.memory) == ["packed"]
    sizes = create_builder(prepared, spec, dtype, cpu, form).weight_sizes()
    assert sizes.by_format == form.memory

    def run(rank: int) -> torch.Tensor:
        attention = DenseAttention(decoders[rank].spec)
        hidden = decoders[rank].forward(TOKENS, positions, attention)
        return decoders[rank].float32_logits(hidden)

    with Ranks(2) as ranks:
        decoders = []
        for group in ranks.groups:
            own = PackedFormat(kernels, DenseFormat(dtype), dtype)
            decoders.append(load_model(prepared, spec, dtype, cpu, lambda _: None, own, group))
            assert own.dense_names == []
        both = ranks.run_on_all(run)
    assert torch.equal(*both)
    assert (both[0] - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("scale", "named"),
    [
        (
            ("F32", np.ones(3, np.float32)),
            r"ffn_down\.scale has shape \[3\], and .*ffn_down\.weight",
        ),
        (("F32", np.full(1, np.nan, np.float32)), r"ffn_down\.scale holds nan"),
        (("F16", np.ones(2, np.uint8)), r"ffn_down\.scale has type F16"),
    ],
    ids=["shape", "nan", "type"],
)
def test_scales_that_do_not_fit_are_named(
    scale: tuple[str, np.ndarray], named: str, tmp_path: Path
) -> None:
    with torch.no_grad():
        _, tensors = tiny("NVFP4", LlamaConfig(**SIZES), permuted=True)
    with pytest.raises(ModelError, match=named):
        with_scales(tmp_path / "scaled", tensors | {"blk.1.ffn_down.scale": scale})


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_zero_and_nonfinite_rope_factors_are_refused(tmp_path: Path, wrong: float) -> None:
    """They would silently make all positions equal or all values NaN."""
    config = LlamaConfig(**SIZES)
    with torch.no_grad():
        _, tensors = tiny("F32", config, permuted=True)
    factors = np.ones(32, dtype=np.float32)
    factors[7] = wrong
    tensors["rope_freqs.weight"] = ("F32", factors)
    with pytest.raises(ModelError, match=rf"rope_freqs\.weight.* by {wrong:g}, which"):
        logits_from_file(tmp_path, config_of(config), tensors)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (TensorEntry("t", "Q8_K", (1, 256), 0, 0, 292), "type Q8_K"),
        (TensorEntry("t", "Q4_0", (2, 48), 0, 0, 54), "blocks of 32"),
        (TensorEntry("t", "Q4_0", (2, 32), 0, 0, 35), "needs 36 bytes, the file has 35"),
        (TensorEntry("t", "F16", (3,), 0, 0, 5), "needs 6 bytes, the file has 5"),
    ],
)
def test_unreadable_tensors_are_refused(entry: TensorEntry, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        decode_gguf(entry, np.zeros(entry.num_bytes, dtype=np.uint8))


@pytest.mark.parametrize("kind", [kind for kind in QUANTISED if kind != "NVFP4"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_scale_that_is_no_number_is_named(kind: str, value: float) -> None:
    """Of the last block; a minimum is one, too."""
    block_bytes = BLOCK_TYPES[kind][1]
    for offset in HALF_SCALES.get(kind, (0,)):
        rows = random_rows(kind, 5, 512, seed=1)
        wrong = b"\xff" if kind == "MXFP4" else np.float16(value).tobytes()
        last = rows.reshape(-1, block_bytes)[-1]
        if kind == "IQ1_M":  # four bits of it are the highest of each of four words
            words, whole = last[48:].view("<u2"), int(np.float16(value).view("<u2"))
            words[:] = words & 0x0FFF | [(whole >> at & 15) << 12 for at in (0, 4, 8, 12)]
        else:
            last[offset : offset + len(wrong)] = np.frombuffer(wrong, np.uint8)
        entry = TensorEntry("t", kind, (5, 512), 0, 0, rows.nbytes)
        with pytest.raises(ModelError, match=f"tensor t of type {kind} has a scale that is NaN"):
            decode_gguf(entry, rows.reshape(-1))


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "token_embd.weight"])
def test_a_weight_in_blocks_with_such_a_scale_is_named(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    """Packed, or left in the mapped file."""
    config = LlamaConfig(**SIZES)
    _, tensors = tiny("Q4_K", config, permuted=True)
    data = tensors[name][1]
    data.reshape(-1)[2:4] = np.frombuffer(np.float16(math.inf).tobytes(), np.uint8)
    write(tmp_path / "model.gguf", tensors)
    prepared = prepare(
        tmp_path / "prepared", config_of(config), gguf_index(tmp_path / "model.gguf")
    )
    dtype, cpu = torch.float32, CPU
    form = PackedFormat(kernels, DenseFormat(dtype), dtype)
    with pytest.raises(ModelError, match=f"tensor {name} of type Q4_K has a scale"):
        load_model(prepared, spec_of(prepared), dtype, cpu, lambda _: None, form)
