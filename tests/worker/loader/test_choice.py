"""The choice of a model's weight format."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel, TensorEntry, TensorIndex
from proto.settings.config import CpuWeights, DeviceConfig, DType, ModelConfig, ServeConfig
from tests.fakes.prepared_models import prepare
from worker.cpu.formats import Bf16Format, choose_format, part_in_blocks
from worker.cpu.kernels import Kernels
from worker.loader.formats import DenseFormat, activation_dtype
from worker.reference.device import ReferenceDevice

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def index(**num_bytes: int) -> TensorIndex:
    entries = tuple(
        TensorEntry(kind, kind, (size,), 0, 0, size) for kind, size in num_bytes.items()
    )
    return TensorIndex("gguf", ("file",), entries)


BLOCKS, NUMBERS = index(Q4_1=90, F32=10), index(BF16=90, Q8_0=10)


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedModel:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 8}
    return prepare(tmp_path, config, NUMBERS)


def kernels() -> Kernels:
    return cast(Kernels, SimpleNamespace())


NO_KERNELS = ReferenceDevice(DeviceConfig(), reason="no compiler")


@pytest.mark.parametrize(
    ("weights", "asked", "dtype", "stored", "expected"),
    [
        ("auto", "auto", BF16, BLOCKS, "packed"),
        ("auto", "auto", F32, BLOCKS, "packed"),
        ("auto", "auto", BF16, NUMBERS, "bf16"),
        ("auto", "auto", F32, NUMBERS, "int8"),
        ("auto", "bfloat16", BF16, BLOCKS, "packed"),
        ("auto", "float32", F32, BLOCKS, "f32"),
        ("auto", "float32", F32, NUMBERS, "f32"),
        ("auto", "float16", F16, BLOCKS, "f16"),
        ("packed", "auto", BF16, BLOCKS, "packed"),
        ("packed", "float32", F32, BLOCKS, "packed"),
        ("packed", "auto", BF16, NUMBERS, "packed"),
        ("int8", "auto", BF16, BLOCKS, "int8"),
        ("int8", "float32", F32, NUMBERS, "int8"),
        ("packed+int8", "auto", BF16, BLOCKS, "packed+int8"),
        ("bf16", "auto", BF16, BLOCKS, "bf16"),
        ("f32", "auto", F32, BLOCKS, "f32"),
    ],
)
def test_the_weight_format_follows_settings_and_model(
    weights: CpuWeights,
    asked: DType,
    dtype: torch.dtype,
    stored: TensorIndex,
    expected: str,
) -> None:
    config = ModelConfig(cpu_weights=weights, dtype=asked)
    assert choose_format(config, dtype, stored, kernels()).name == expected


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_bfloat16_weights_use_the_kernels_if_built(
    weights: CpuWeights, prepared: PreparedModel
) -> None:
    config = ModelConfig(cpu_weights=weights, dtype="bfloat16")
    assert type(choose_format(config, BF16, NUMBERS, kernels())) is Bf16Format
    found = NO_KERNELS.weight_format(ServeConfig(model=config), prepared)
    assert type(found) is DenseFormat
    assert found.name == "bf16"


@pytest.mark.parametrize("weights", ["packed", "int8", "packed+int8"])
def test_packed_weights_without_kernels_are_a_config_error(
    weights: CpuWeights, prepared: PreparedModel
) -> None:
    refusal = re.escape(f"--cpu-weights {weights} needs kernels: no compiler")
    with pytest.raises(ConfigError, match=refusal):
        NO_KERNELS.weight_format(ServeConfig(model=ModelConfig(cpu_weights=weights)), prepared)


@pytest.mark.parametrize(
    ("weights", "asked", "expected"),
    [
        ("bf16", "auto", "bfloat16"),
        ("f32", "auto", "float32"),
        ("packed", "auto", "auto"),
        ("int8", "float32", "float32"),
    ],
)
def test_dense_weights_set_the_dtype_of_activations(
    weights: CpuWeights, asked: DType, expected: DType
) -> None:
    assert activation_dtype(ModelConfig(cpu_weights=weights, dtype=asked)) == expected


def test_the_quantised_share_is_counted_in_bytes() -> None:
    assert part_in_blocks(BLOCKS) == 0.9
    assert part_in_blocks(index()) == 0.0
