"""The process of `tokend bench products`: times each distinct product of a model by all that can
compute it.

It reads a ProductsBoot from its standard input and prints JSON. It has a worker's threads and
chooses kernels as a worker does. oneDNN's product of bfloat16 is timed for comparison; a row's bits
depend on the number of rows there.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from proto.codec import MessageDecoder
from proto.errors import ConfigError, TokendError
from proto.lifecycle import ProductsBoot
from worker.device.devices import create_device
from worker.kernels import Kernels, product_kernels
from worker.layers.kernel_weights import KernelFormat, KernelWeight
from worker.layers.linear import OneDnnLinear, is_reordered_by_onednn
from worker.loader.format_choice import activation_dtype, weight_format_for
from worker.loader.product_choice import product_name
from worker.loader.weights import DecoderBuilder, create_builder
from worker.models.registry import model_spec
from worker.models.transformers_model import TransformersSpec
from worker.parallel.group import RankGroup

ONEDNN: Final = "oneDNN"
_SECONDS: Final = 0.2
"""Time for each product and number of rows, by each that can compute it."""


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


def measure(
    weight: KernelWeight, dtype: torch.dtype, rows: Sequence[int]
) -> dict[str, list[float]]:
    """Return the milliseconds of the product with `rows` rows by each that can compute it."""
    times: dict[str, list[float]] = {}
    dense = None
    if weight.weight_format is KernelFormat.BF16 and is_reordered_by_onednn(
        torch.device("cpu"), dtype
    ):
        zeros = torch.zeros(weight.out_features, weight.in_features, dtype=dtype)
        dense = OneDnnLinear(zeros, None)
    for num_rows in rows:
        x = torch.ones(num_rows, weight.in_features, dtype=dtype)
        calls: dict[str, Callable[[], object]] = {}
        for kernels in product_kernels():
            calls[kernels.variant] = partial(_multiply, weight, kernels, x)
        if dense is not None:
            calls[ONEDNN] = partial(dense, x)
        for name, taken in best_ms(calls).items():
            times.setdefault(name, []).append(taken)
    return times


def _multiply(weight: KernelWeight, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    weight.use_kernels(kernels)
    return weight.multiply(x)


def report(boot: ProductsBoot) -> dict[str, Any]:
    """Return the figures of the benchmark. Raises ConfigError if there is nothing to choose."""
    config, prepared = boot.config, boot.model
    device = create_device(config, 0)
    dtype = device.resolve_dtype(activation_dtype(config.model))
    weight_format = weight_format_for(config.model, prepared, device)
    spec = model_spec(prepared, config)
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
        device.torch_device,
        weight_format,
        RankGroup(0, config.parallel.tensor_parallel_size),
    )
    with torch.inference_mode():
        build_distinct(builder)
        weights = {product_name(weight, dtype): weight for weight in weight_format.kernel_weights}
        if not weights:
            raise ConfigError(
                f"weights in {weight_format.name} are multiplied by torch alone: nothing to choose",
                "cpu_weights",
            )
        builder.choose_products()
        chosen = {name: weight.multiplied_by.variant for name, weight in weights.items()}
        products = [
            {
                "product": name,
                "weight_bytes": weight.nbytes,
                "chosen": chosen[name],
                "ms": measure(weight, dtype, boot.rows),
            }
            for name, weight in weights.items()
        ]
    return {
        "model": prepared.name,
        "device": device.name,
        "num_threads": torch.get_num_threads(),
        "rows": boot.rows,
        "products": products,
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
