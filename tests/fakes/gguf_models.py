"""Tiny models in GGUF files, and how far a format changes them."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, PretrainedConfig

from proto.messages.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.gguf_files import write
from tests.fakes.prepared_models import gguf_index, prepare, spec_of
from tests.fakes.tiny_ggufs import NO_KINDS, SIZES, config_of, tiny
from worker.cpu.formats import PackedFormat
from worker.cpu.kernels import Kernels
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.weights import load_model

TOKENS = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(3))

PERPLEXITY = 0.005
"""By how much a format may raise the perplexity of the exact numbers, a part of it."""


def prepared_gguf(
    folder: Path,
    kind: str,
    config: PretrainedConfig | None = None,
    kinds: Mapping[str, str] = NO_KINDS,
) -> PreparedModel:
    config = config or LlamaConfig(**SIZES)
    with torch.no_grad():
        _, tensors = tiny(kind, config, permuted=True, kinds=kinds)
    folder.mkdir(exist_ok=True)
    write(folder / "model.gguf", tensors)
    return prepare(folder / "prepared", config_of(config), gguf_index(folder / "model.gguf"))


def packed(kernels: Kernels, dtype: torch.dtype = torch.float32) -> PackedFormat:
    return PackedFormat(kernels, DenseFormat(dtype), dtype)


def logits(
    prepared: PreparedModel, form: WeightFormat | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    spec = spec_of(prepared)
    decoder = load_model(prepared, spec, dtype, CPU, lambda fraction: None, form)
    positions = torch.arange(len(TOKENS))
    return decoder.float32_logits(decoder.forward(TOKENS, positions, DenseAttention(spec)))


def perplexity_change(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return by how much the perplexity of texts that the exact model writes grows, a part of it.

    Over all texts, the mean logarithm is the divergence of both distributions: it needs no texts.
    """
    exact, own = expected.double().log_softmax(1), found.double().log_softmax(1)
    return math.expm1(float((exact.exp() * (exact - own)).sum(1).mean()))
