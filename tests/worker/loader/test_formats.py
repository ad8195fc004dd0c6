"""Weight formats: their results, their memory, and which weights stay dense.

Packed weights are compared with a dense model of the dequantised values whose products quantise
activations like reference/packed.py, so that only the order of sums differs.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, PretrainedConfig

from tests.fakes.devices import CPU
from tests.fakes.gguf_files import QUANTISED
from tests.fakes.gguf_models import (
    PERPLEXITY,
    TOKENS,
    logits,
    packed,
    perplexity_change,
    prepared_gguf,
)
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.tiny_ggufs import NO_KINDS, SIZES
from tests.worker.reference.packed import quantise_dense, rounded_rows
from worker.cpu import formats as cpu_formats
from worker.cpu.formats import Bf16Format, Int8Format, MixedFormat, RotatedFormat
from worker.cpu.kernels import Kernels
from worker.cpu.linear import is_reordered_by_onednn
from worker.device import Device
from worker.layers.embedding import EmbeddingTable, dense_table
from worker.layers.linear import Linear
from worker.loader import formats
from worker.loader.files import read_index
from worker.loader.formats import DenseFormat, describe_dense_weights
from worker.loader.weights import create_builder, load_model
from worker.parallel.group import RankGroup

TIE = 0.1
"""Sums in another order may move an activation by one of its 255 steps, and so what follows."""
EXACT = 1e-4
"""Where none was moved, as in some of the positions."""


class RoundedLinear(Linear):
    """A dense product whose activations are quantised to 8 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self._bias is None else self._bias.double()
        return F.linear(rounded_rows(x), self._weight.double(), bias).to(x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + self(x)


class RoundedFormat(DenseFormat):
    """The reference format. new_blocks: weights are quantised to 8 bits as well."""

    def __init__(self, new_blocks: bool = False) -> None:
        super().__init__(torch.float32)
        self._new_blocks = new_blocks

    def build(self, device: Device, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return RoundedLinear(self._held(weight), bias)

    def _build_tied(self, device: Device, table: torch.Tensor) -> tuple[EmbeddingTable, Linear]:
        return dense_table(self._held(table)), self.build(device, table, None)

    def _held(self, weight: torch.Tensor) -> torch.Tensor:
        return quantise_dense(weight) if self._new_blocks else weight


def assert_same_tokens(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.3, "a difference would not be visible"
    differences = (found - expected).abs().amax(1)
    assert differences.min() < EXACT
    assert differences.max() < TIE
    best = expected.gather(1, found.argmax(1, keepdim=True))[:, 0]
    assert (expected.amax(1) - best).max() < TIE


@pytest.mark.parametrize("kind", QUANTISED)
def test_packed_weights_of_every_block_type(kind: str, kernels: Kernels, tmp_path: Path) -> None:
    """In the memory of the file, where some scales have 6 bits, and NVFP4 has no factors."""
    prepared = prepared_gguf(tmp_path, kind)
    form = packed(kernels)
    found = logits(prepared, form)
    assert_same_tokens(found, logits(prepared, RoundedFormat()))
    assert perplexity_change(found, logits(prepared)) < PERPLEXITY
    assert form.dense_names == []
    assert list(form.memory) == ["packed"]
    entries = read_index(prepared).tensors
    stored = sum(entry.num_bytes for entry in entries if entry.type == kind)
    assert form.memory["packed"] <= 1.04 * stored


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, attention_bias=True),
        LlamaConfig(**SIZES | {"tie_word_embeddings": False}),
    ],
    ids=["biases", "an untied head"],
)
@pytest.mark.parametrize("kinds", [NO_KINDS, {"v_proj": "Q8_0", "k_proj": "Q4_1"}])
def test_fused_products_equal_separate_ones(
    kinds: Mapping[str, str], config: PretrainedConfig, kernels: Kernels, tmp_path: Path
) -> None:
    """Query, key and value are one product, also if the file stores them in several types."""
    prepared = prepared_gguf(tmp_path, "Q5_0", config, kinds)
    assert_same_tokens(logits(prepared, packed(kernels)), logits(prepared, RoundedFormat()))


def test_weights_are_quantised_to_int8(kernels: Kernels, tmp_path: Path) -> None:
    prepared = prepared_gguf(tmp_path, "F16")
    form = Int8Format(kernels, DenseFormat(torch.float32), torch.float32)
    assert_same_tokens(logits(prepared, form), logits(prepared, RoundedFormat(new_blocks=True)))
    assert list(form.memory) == ["int8"]


def test_weights_that_cannot_be_packed_are_dense_and_named(
    kernels: Kernels, tmp_path: Path
) -> None:
    prepared = prepared_gguf(tmp_path, "Q4_0", kinds={"down_proj": "F16"})
    form = packed(kernels)
    dense, mixed = logits(prepared), logits(prepared, form)
    assert 0 < (mixed - dense).abs().max() < 0.3
    assert sorted(form.memory) == ["f32", "packed"]
    assert form.memory["f32"] == 2 * 256 * 256 * 4
    assert describe_dense_weights(form) == (
        "2 weights are dense, as the kernels have no whole blocks for them: "
        "layers.0.down.weight (F16), layers.1.down.weight (F16)"
    )


def test_rows_of_partial_blocks_stay_dense(kernels: Kernels, tmp_path: Path) -> None:
    """The MLP's inner size of this model is 112, not a multiple of 32."""
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    form = Int8Format(kernels, DenseFormat(torch.float32), torch.float32)
    assert 0 < (logits(prepared, form) - logits(prepared)).abs().mean() < 0.1
    assert sorted(form.dense_names) == [f"layers.{layer}.down.weight (F32)" for layer in range(3)]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_takes_no_memory_beside_the_head(
    kind: str, tied: bool, kernels: Kernels, tmp_path: Path
) -> None:
    """A tied weight is stored once; an embedding of its own stays in the mapped file."""
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": tied})
    prepared, form = prepared_gguf(tmp_path, kind, config), packed(kernels)
    found = logits(prepared, form)
    if kind != "F16":
        assert_same_tokens(found, logits(prepared, RoundedFormat()))
    builder = create_builder(prepared, spec_of(prepared), torch.float32, CPU, form, RankGroup())
    assert form.memory == builder.weight_sizes().by_format
    memory: Counter[str] = Counter()
    table = formats.read_table(builder.source, memory)
    assert not memory
    ids = torch.tensor([3, 0, 3, 63])
    assert torch.equal(table.rows(ids), builder.source.read("embedding.weight")[ids])
    assert table.rows(ids[:0]).shape == (0, 256)
    for wrong in (-1, 64):
        with pytest.raises(IndexError):
            table.rows(torch.tensor([0, wrong]))


def mapped_kilobytes(path: str) -> int:
    """Return how much of a mapped file is in this process."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith(path)
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_a_file_that_stays_mapped_are_given_back(kernels: Kernels, tmp_path: Path) -> None:
    """The embedding keeps the file mapped; the weights beside it are in the kernels' form."""
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": False})
    prepared = prepared_gguf(tmp_path, "Q8_0", config)
    (path,) = read_index(prepared).files
    spec, device = spec_of(prepared), CPU
    decoder = load_model(prepared, spec, torch.float32, device, print, packed(kernels))
    assert mapped_kilobytes(path) == 0
    decoder._embedding(torch.tensor([3]))
    assert mapped_kilobytes(path) > 0


def mixed(kernels: Kernels) -> MixedFormat:
    return MixedFormat(packed(kernels, torch.bfloat16), kernels)


INT8_ERROR = 0.1
"""Relative error of logits in tiny random models by 8 bits with one scale per row."""


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("least", [4, 64])
def test_the_number_of_rows_selects_packed_or_rotated(
    least: int, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_formats, "ROTATED_FROM", least)
    prepared, form = prepared_gguf(tmp_path, "Q4_1"), mixed(kernels)
    found = logits(prepared, form, torch.bfloat16)
    few = logits(prepared, packed(kernels, torch.bfloat16), torch.bfloat16)
    exact = logits(prepared)
    assert torch.equal(found, few) == (len(TOKENS) < least)
    assert relative(found, exact) < INT8_ERROR
    assert form.name == "packed+int8"
    assert sorted(form.memory) == ["int8", "packed"]


def rotated(kernels: Kernels) -> RotatedFormat:
    dense = DenseFormat(torch.float32)
    return RotatedFormat(Int8Format(kernels, dense, torch.float32), dense, kernels)


@pytest.mark.parametrize("kind", ["F16", "Q4_1"])
def test_every_stored_type_can_be_rotated(kind: str, kernels: Kernels, tmp_path: Path) -> None:
    prepared, form = (
        prepared_gguf(tmp_path, kind, LlamaConfig(**SIZES, attention_bias=True)),
        rotated(kernels),
    )
    assert 0 < relative(logits(prepared, form), logits(prepared)) < INT8_ERROR
    assert list(form.memory) == ["int8"]
    assert form.dense_names == []


def test_rows_that_cannot_be_rotated_stay_dense(kernels: Kernels, tmp_path: Path) -> None:
    """The MLP's inner size of this model is 112, not a multiple of 32."""
    save_tiny("llama", tmp_path)
    prepared, form = prepare_checkpoint(tmp_path, tmp_path / "prepared"), rotated(kernels)
    assert 0 < relative(logits(prepared, form), logits(prepared)) < INT8_ERROR
    assert sorted(form.dense_names) == [f"layers.{layer}.down.weight (F32)" for layer in range(3)]
    assert sorted(form.memory) == ["f32", "int8"]


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_weights_are_stored_in_panels(
    tied: bool, kernels: Kernels, tmp_path: Path
) -> None:
    """A tied weight is stored once, by oneDNN twice; torch multiplies the same values."""
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": tied}, attention_bias=True)
    prepared, form = prepared_gguf(tmp_path, "F16", config), Bf16Format(kernels)
    dense = DenseFormat(torch.bfloat16)
    found, expected = (logits(prepared, each, torch.bfloat16) for each in (form, dense))
    exact = logits(prepared)
    assert 0 < relative(found, exact) < 0.03
    assert relative(found, exact) < 1.2 * relative(expected, exact)
    assert form.name == dense.name == "bf16"
    assert list(form.memory) == ["bf16"]
    is_copied = tied and is_reordered_by_onednn(torch.bfloat16)
    table = 64 * 256 * 2
    assert form.memory["bf16"] == dense.memory["bf16"] - (table if is_copied else 0)


def test_weights_that_cannot_be_packed_are_dense_in_both_formats(
    kernels: Kernels, tmp_path: Path
) -> None:
    prepared = prepared_gguf(tmp_path, "Q4_0", kinds={"down_proj": "F16"})
    form = mixed(kernels)
    logits(prepared, form, torch.bfloat16)
    assert sorted(form.memory) == ["bf16", "int8", "packed"]
    assert sorted(form.dense_names) == [f"layers.{layer}.down.weight (F16)" for layer in range(2)]
