"""The process of `tokend bench products`: times products and attention of a model by all kernels.

It reads a ProductsBoot from its standard input and prints JSON. It has a worker's threads and
chooses kernels as a worker does. oneDNN's product of bfloat16 is timed for comparison; a row's bits
depend on the number of rows there. So is attention in plain torch where a worker uses it.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from proto.codec import MessageDecoder
from proto.errors import ConfigError, TokendError
from proto.messages.lifecycle import ProductsBoot
from proto.settings.config import ServeConfig
from worker.attention.backend import AttentionShape
from worker.attention.kv_cache import resolve_kv_dtype
from worker.cpu.attention import UnsupportedShapeError
from worker.cpu.formats import kernel_weights
from worker.cpu.kernel_choice import (
    KernelSample,
    attention_call,
    attention_name,
    attention_sample,
    choose_attention,
    product_name,
    product_sample,
)
from worker.cpu.kernels import candidate_kernels
from worker.cpu.linear import OneDnnLinear, is_reordered_by_onednn
from worker.cpu.weights import KernelFormat, KernelWeight
from worker.create_device import create_device
from worker.loader.formats import activation_dtype
from worker.loader.weights import DecoderBuilder, create_builder
from worker.models.registry import model_spec
from worker.models.transformers_model import TransformersSpec
from worker.parallel.group import RankGroup
from worker.reference.attention import ReferenceAttention

ONEDNN: Final = "oneDNN"
REFERENCE: Final = "reference"
"""Attention in plain torch, which a worker uses for heads that no kernels support."""
_SECONDS: Final = 0.2
"""Time for each product and number of rows, by each that can compute it."""
RowsCall = Callable[[int], Callable[[], object]]
"""Takes a number of rows and returns a function that computes them."""


def build_distinct(builder: DecoderBuilder) -> None:
    """Build the head, and each product of the layers whose types and shapes are new."""
    source, weight_format = builder.source, builder.weight_format
    seen = set()
    for layer in range(builder.spec.num_layers):
        for product in builder.products(layer):
            shapes = tuple(
                (source.type_of(name), source.joined_shape(name)) for name in product.weights
            )
            if shapes not in seen:
                seen.add(shapes)
                weight_format.read_product(source, product)()
    builder.build_ends()


def best_ms(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the shortest time of each call in milliseconds; they alternate."""
    best: dict[str, float] = {}
    end = time.perf_counter() + _SECONDS * len(calls)
    for number in range(1000):
        if number > 2 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken = (time.perf_counter() - start) * 1e3
            if number:  # the first round is the warm-up
                best[name] = min(taken, best.get(name, taken))
    return best


def candidate_calls(sample: KernelSample) -> dict[str, RowsCall]:
    """Return the sample's calls by each candidate library."""
    return {kernels.variant: partial(sample, kernels) for kernels in candidate_kernels()}


def measure(calls: Mapping[str, RowsCall], rows: Sequence[int]) -> dict[str, list[float]]:
    """Return the milliseconds of `rows` rows by each call."""
    times: dict[str, list[float]] = {}
    for num_rows in rows:
        of_rows = {name: call_of(num_rows) for name, call_of in calls.items()}
        for name, taken in best_ms(of_rows).items():
            times.setdefault(name, []).append(taken)
    return times


def onednn_product(weight: KernelWeight, dtype: torch.dtype) -> dict[str, RowsCall]:
    """Return oneDNN's product with a bfloat16 weight of this shape by its name, if it has one."""
    if weight.weight_format is not KernelFormat.BF16 or not is_reordered_by_onednn(dtype):
        return {}
    zeros = torch.zeros(weight.out_features, weight.in_features, dtype=dtype)
    dense = OneDnnLinear(zeros, None)
    return {
        ONEDNN: lambda num_rows: partial(
            dense, torch.ones(num_rows, weight.in_features, dtype=dtype)
        )
    }


def report(boot: ProductsBoot) -> dict[str, Any]:
    """Return the figures of the benchmark. Raises ConfigError if there is nothing to choose."""
    config, prepared = boot.config, boot.model
    device = create_device(config, 0)
    dtype = device.resolve_dtype(activation_dtype(config.model))
    weight_format = device.weight_format(config, prepared)
    spec = model_spec(prepared, config, device.head_dims)
    if isinstance(spec, TransformersSpec):
        raise ConfigError(
            f"{spec.architecture} runs on transformers' code; only products of tokend's own "
            "families are measured",
            "model_impl",
        )
    builder = create_builder(
        prepared,
        spec,
        dtype,
        device,
        weight_format,
        RankGroup(0, config.parallel.tensor_parallel_size),
    )
    with torch.inference_mode():
        build_distinct(builder)
        weights = {product_name(weight, dtype): weight for weight in kernel_weights(weight_format)}
        if not weights:
            raise ConfigError(
                f"weights in {weight_format.name} are multiplied by torch alone: nothing to choose",
                "cpu_weights",
            )
        builder.choose_products()
        chosen = {name: weight.multiplied_by.variant for name, weight in weights.items()}
        products = [
            {
                "name": name,
                "weight_bytes": weight.nbytes,
                "chosen": chosen[name],
                "ms": measure(
                    candidate_calls(product_sample(weight, dtype)) | onednn_product(weight, dtype),
                    boot.rows,
                ),
            }
            for name, weight in weights.items()
        ]
        attention = attention_times(config, prepared.folder, spec.attention_shape, dtype, boot.rows)
    return {
        "model": prepared.name,
        "device": device.name,
        "num_threads": torch.get_num_threads(),
        "rows": boot.rows,
        "products": products,
        "attention": attention,
    }


def attention_times(
    config: ServeConfig,
    folder: str,
    shape: AttentionShape,
    dtype: torch.dtype,
    rows: Sequence[int],
) -> dict[str, Any]:
    """Return the figures of attention under one KV head.

    In plain torch if no kernels support the heads.
    """
    kv_dtype = resolve_kv_dtype(
        config.cache.kv_cache_dtype, dtype, shape.head_dim, shape.latent_dim
    )
    sample = attention_sample(shape, dtype, kv_dtype)
    try:
        default = candidate_kernels()[0]
        sample(default, 1)
        kernels, _ = choose_attention(shape, dtype, kv_dtype, folder)
        calls, chosen = candidate_calls(sample), (kernels or default).variant
    except UnsupportedShapeError:
        reference = partial(attention_call, ReferenceAttention, shape, dtype, kv_dtype)
        calls, chosen = {REFERENCE: reference}, REFERENCE
    return {
        "name": attention_name(shape, dtype, kv_dtype),
        "chosen": chosen,
        "ms": measure(calls, rows),
    }


def main() -> int:
    """Print the report; return the exit status."""
    boot = MessageDecoder[ProductsBoot](ProductsBoot).decode(sys.stdin.buffer.read())
    try:
        print(json.dumps(report(boot)))
    except TokendError as error:
        print(f"tokend: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
