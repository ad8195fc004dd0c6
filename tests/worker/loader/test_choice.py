"""The choice of a model's weight format on simulated machines."""

from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
import torch

from proto.config import CpuWeights, DType, ModelConfig
from proto.errors import ConfigError
from proto.prepared_model import TensorEntry, TensorIndex
from worker.kernels import Kernels, KernelsUnavailableError
from worker.loader.format_choice import activation_dtype, choose_format, part_in_blocks
from worker.loader.formats import AmxFormat, Bf16Format, DenseFormat, MixedFormat

AMX = ("avx512_bf16", "amx_bf16")
NO_AMX = ("avx512_bf16",)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def index(**num_bytes: int) -> TensorIndex:
    entries = tuple(
        TensorEntry(kind, kind, (size,), 0, 0, size) for kind, size in num_bytes.items()
    )
    return TensorIndex("gguf", ("file",), entries)


BLOCKS, NUMBERS = index(Q4_1=90, F32=10), index(BF16=90, Q8_0=10)


def kernels(variant: str = "amx") -> Kernels:
    return cast(Kernels, SimpleNamespace(variant=variant))


def no_kernels() -> NoReturn:
    raise KernelsUnavailableError("no compiler")


@pytest.mark.parametrize(
    ("weights", "asked", "dtype", "stored", "flags", "expected"),
    [
        ("auto", "auto", BF16, BLOCKS, AMX, "packed+rotated"),
        ("auto", "auto", BF16, BLOCKS, NO_AMX, "packed+rotated"),
        ("auto", "auto", F32, BLOCKS, (), "packed+rotated"),
        ("auto", "auto", BF16, NUMBERS, AMX, "bf16"),
        ("auto", "auto", F32, NUMBERS, (), "int8"),
        ("auto", "bfloat16", BF16, BLOCKS, NO_AMX, "packed+rotated"),
        ("auto", "float32", F32, BLOCKS, AMX, "f32"),
        ("auto", "float32", F32, NUMBERS, (), "f32"),
        ("auto", "float16", F16, BLOCKS, AMX, "f16"),
        ("packed", "auto", BF16, BLOCKS, AMX, "packed"),
        ("packed", "float32", F32, BLOCKS, AMX, "packed"),
        ("packed", "auto", BF16, NUMBERS, AMX, "packed"),
        ("int8", "auto", BF16, BLOCKS, AMX, "int8"),
        ("int8", "float32", F32, NUMBERS, (), "int8"),
        ("bf16", "auto", BF16, BLOCKS, (), "bf16"),
        ("f32", "auto", F32, BLOCKS, AMX, "f32"),
    ],
)
def test_the_weight_format_follows_setting_model_and_cpu(
    weights: CpuWeights,
    asked: DType,
    dtype: torch.dtype,
    stored: TensorIndex,
    flags: tuple[str, ...],
    expected: str,
) -> None:
    config = ModelConfig(cpu_weights=weights, dtype=asked)
    assert choose_format(config, dtype, stored, flags, kernels).name == expected


@pytest.mark.parametrize("variant", ["avx512", "avx2", "baseline"])
def test_one_format_is_used_if_a_second_gains_nothing(variant: str) -> None:
    form = choose_format(ModelConfig(), F32, BLOCKS, (), lambda: kernels(variant))
    assert form.name == "packed"


def test_with_amx_the_head_is_dense_as_well() -> None:
    for flags, kind in ((AMX, AmxFormat), (NO_AMX, MixedFormat)):
        assert type(choose_format(ModelConfig(), BF16, BLOCKS, flags, kernels)) is kind


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_bfloat16_weights_use_the_kernels_if_built(weights: CpuWeights) -> None:
    config = ModelConfig(cpu_weights=weights)
    assert type(choose_format(config, BF16, NUMBERS, AMX, kernels)) is Bf16Format
    assert type(choose_format(config, BF16, NUMBERS, AMX, no_kernels)) is DenseFormat


@pytest.mark.parametrize("stored", [BLOCKS, NUMBERS])
def test_without_kernels_auto_is_dense(stored: TensorIndex) -> None:
    assert choose_format(ModelConfig(), BF16, stored, AMX, no_kernels).name == "bf16"


@pytest.mark.parametrize("weights", ["packed", "int8"])
def test_packed_weights_without_kernels_are_a_config_error(weights: CpuWeights) -> None:
    with pytest.raises(ConfigError, match=f"--cpu-weights {weights} needs kernels: no compiler"):
        choose_format(ModelConfig(cpu_weights=weights), BF16, BLOCKS, AMX, no_kernels)


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
