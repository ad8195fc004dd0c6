"""Which format the weights of a model get: the requested one, or the best for this CPU.

The choice depends on CPU, settings and file types alone, never on timing, so every start of a
daemon chooses alike.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Final

import torch

from proto.config import CpuWeights, DType, ModelConfig, ServeConfig
from proto.errors import ConfigError
from proto.prepared_model import PreparedModel, TensorIndex
from worker.device.devices import Device
from worker.kernels import Kernels, KernelsUnavailableError, load_kernels
from worker.layers.kernel_weights import BLOCK_COLUMNS
from worker.loader.files import read_index
from worker.loader.formats import (
    Bf16Format,
    DenseFormat,
    FixedRowsFormat,
    Int8Format,
    MixedFormat,
    PackedFormat,
    RotatedFormat,
    WeightFormat,
)
from worker.loader.gpu_format import GpuFormat
from worker.models.registry import runs_on_transformers
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec

_NUM_NAMED: Final = 4
_DTYPE_OF_WEIGHTS: Final[dict[CpuWeights, DType]] = {"bf16": "bfloat16", "f32": "float32"}
_QUANTISED_SHARE: Final = 0.5
"""Part of the numbers in blocks from which on a model counts as quantised."""


def activation_dtype(config: ModelConfig) -> DType:
    """Return the dtype of the activations; dense weights fix it to their own."""
    return _DTYPE_OF_WEIGHTS.get(config.cpu_weights, config.dtype)


def weight_format_for(config: ServeConfig, prepared: PreparedModel, device: Device) -> WeightFormat:
    """Return the format that a model's weights get on this device."""
    dtype = device.resolve_dtype(activation_dtype(config.model))
    if device.torch_device.type == "cuda":
        return FixedRowsFormat(dtype) if config.device.batch_invariant else GpuFormat(dtype)
    if runs_on_transformers(prepared, config.model.model_impl):
        return _dense_format(dtype, load_kernels)
    return choose_format(config.model, dtype, read_index(prepared), load_kernels)


def is_batch_invariant(weight_format: WeightFormat, dtype: torch.dtype, spec: ModelSpec) -> bool:
    """Return whether a row has the same bits in a step of any number of rows.

    So it is with our kernels of one format, on a CPU, and with products of fixed shape on a GPU.
    Others choose by the number of rows: the mixed format, torch's products, transformers' code.
    dtype: of the activations.
    """
    if isinstance(spec, TransformersSpec):
        return False
    if isinstance(weight_format, FixedRowsFormat):
        return True
    has_float32_products = bool(weight_format.dense_names) and dtype != torch.bfloat16
    own = isinstance(weight_format, Bf16Format | PackedFormat | RotatedFormat)
    return own and not has_float32_products


def choose_format(
    config: ModelConfig,
    dtype: torch.dtype,
    index: TensorIndex,
    kernels_of_cpu: Callable[[], Kernels],
) -> WeightFormat:
    """Return the format for a model's weights, with activations of `dtype`.

    Raises ConfigError for a format that needs kernels if there are none.

    bfloat16 weights use our kernels if there are any. "auto" gives dense weights if a float type
    was requested that has no block products or that promises exactness (--dtype float32, float16),
    or without kernels. Otherwise a quantised model stays `packed`, and a dense model becomes
    bfloat16 if the CPU multiplies it, or `int8`: a single format, so that memory holds the weights
    once and a row has the same bits in every batch.
    """
    if config.cpu_weights == "f32" or config.dtype == "float16":
        return DenseFormat(dtype)
    if config.cpu_weights == "auto" and config.dtype == "float32":
        return DenseFormat(dtype)
    try:
        kernels = kernels_of_cpu()
    except KernelsUnavailableError as reason:
        if config.cpu_weights not in ("auto", "bf16"):
            raise ConfigError(
                f"--cpu-weights {config.cpu_weights} needs kernels: {reason}", "cpu_weights"
            ) from None
        return DenseFormat(dtype)
    dense = Bf16Format(kernels) if dtype == torch.bfloat16 else DenseFormat(dtype)
    blocks = PackedFormat(kernels, dense, dtype)
    int8 = RotatedFormat(Int8Format(kernels, dense, dtype), dense, kernels)
    match config.cpu_weights:
        case "bf16":
            return dense
        case "packed":
            return blocks
        case "int8":
            return int8
        case "packed+int8":
            return MixedFormat(blocks, kernels)
    if part_in_blocks(index) >= _QUANTISED_SHARE:
        return blocks
    return int8 if dtype == torch.float32 else dense


def _dense_format(dtype: torch.dtype, kernels_of_cpu: Callable[[], Kernels]) -> DenseFormat:
    """Return the format of weights that keep the activations' dtype: by our kernels if they can."""
    try:
        return Bf16Format(kernels_of_cpu()) if dtype == torch.bfloat16 else DenseFormat(dtype)
    except KernelsUnavailableError:
        return DenseFormat(dtype)


def part_in_blocks(index: TensorIndex) -> float:
    """Return the fraction of a model's numbers that kernels multiply as they are stored: 0 to 1.

    Not of its bytes: embedding and head of many quantised checkpoints are as they were, and four
    times as long.
    """
    numbers: Counter[bool] = Counter()
    for entry in index.tensors:
        numbers[entry.type in BLOCK_COLUMNS] += math.prod(entry.shape)
    return numbers[True] / max(1, numbers.total())


def describe_dense_weights(weight_format: WeightFormat) -> str:
    """Return a line about weights that are dense for lack of a kernel; "" if there are none."""
    names = weight_format.dense_names
    if not names:
        return ""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return (
        f"{len(names)} weights are dense, as the kernels have no whole blocks for them: "
        f"{', '.join(sorted(names)[:_NUM_NAMED])}{more}"
    )
