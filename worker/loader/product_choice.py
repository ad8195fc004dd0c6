"""Which kernels compute the products with a weight: those that take the least time here.

Libraries for several instruction sets can compute a product (worker/kernels.py:product_kernels).
Each distinct product of a model is timed once with all of them, and the times are kept in the
prepared folder for later starts, replacement workers, replicas and ranks, which all choose alike.

A choice holds for every number of rows, because the bits of some products depend on it. oneDNN is
no candidate: its bits depend on the number of rows.
"""

import logging
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch

from proto.codec import MessageDecoder, encode
from proto.errors import ProtocolError
from proto.prepared_model import ProductTimes
from worker.device.devices import cpu_model_name
from worker.kernels import Kernels, product_kernels
from worker.layers.kernel_weights import KernelWeight
from worker.loader.digest import locked

TIMES_FILE: Final = "products.msgpack"
ROWS: Final = (1, 64)
"""Rows of the timed products: a token alone, and a full batch or a part of a prompt."""
LEAST_GAIN: Final = 0.05
"""Share of the time that other kernels must save to replace the default ones."""
_SAMPLE_NUMBERS: Final = 1 << 18
"""Numbers of a weight that is timed: they stay in the L2 cache. Reading from memory takes the same
time for all kernels, or hides what they differ in."""
_ROUNDS: Final = 6
_MEASURE_SECONDS: Final = 0.2
"""Time after which no further round begins."""
_MOST_MACHINES: Final = 16
logger = logging.getLogger("tokend.kernels")

Times = dict[str, tuple[float, ...]]
"""Nanoseconds of one thread by variant, for each of ROWS."""


@dataclass(frozen=True)
class ProductChoice:
    """The kernels of a product. ratios: of the times of all candidates to the shortest, by name."""

    product: str
    variant: str
    ratios: dict[str, float]


def choose_products(
    weights: Sequence[KernelWeight], dtype: torch.dtype, folder: str
) -> list[ProductChoice]:
    """Let the fastest kernels multiply with each weight; log and return the choices.

    dtype: of the activations. folder: of the prepared model. Without the right to write there,
    the default kernels multiply, so that all workers choose alike.
    """
    if not weights or len(candidates := product_kernels()) == 1:
        return []
    distinct = {product_name(weight, dtype): weight for weight in weights}
    try:
        times = _times_of(distinct, dtype, candidates, folder)
    except OSError as error:
        logger.warning(
            "products by %s: times cannot be kept: %s", candidates[0].variant, error.strerror
        )
        return []
    choices = {name: choose(name, times[name]) for name in distinct}
    by_name = {kernels.variant: kernels for kernels in candidates}
    for weight in weights:
        weight.use_kernels(by_name[choices[product_name(weight, dtype)].variant])
    logger.info("products by time: %s", describe_choices(choices.values()))
    return list(choices.values())


def choose(product: str, times: Times) -> ProductChoice:
    """Return the choice by the times of all candidates, the first of which is the default."""
    means = {variant: statistics.geometric_mean(of_rows) for variant, of_rows in times.items()}
    default, fastest = next(iter(means)), min(means, key=means.__getitem__)
    variant = fastest if means[fastest] < means[default] * (1 - LEAST_GAIN) else default
    return ProductChoice(product, variant, {name: means[name] / means[fastest] for name in means})


def describe_choices(choices: Iterable[ProductChoice]) -> str:
    """Return the choices as text: products of one type together where they have the same kernels.

    For example "bf16 by avx512_bf16 (avx512 2.1, avx2 3.2 times as long)".
    """

    def key(choice: ProductChoice) -> tuple[str, str]:
        return choice.product.split()[0], choice.variant

    texts = []
    for (type_name, variant), group in groupby(sorted(choices, key=key), key):
        alike = list(group)
        means = {
            name: statistics.geometric_mean(
                choice.ratios[name] / choice.ratios[variant] for choice in alike
            )
            for name in alike[0].ratios
            if name != variant
        }
        others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in means.items())
        texts.append(f"{type_name} by {variant} ({others} times as long)")
    return "; ".join(texts)


def product_name(weight: KernelWeight, dtype: torch.dtype) -> str:
    """Return the type and shape of a weight and the dtype of the activations: what is timed."""
    shape = f"{weight.out_features}x{weight.in_features}"
    return f"{weight.type_name} {shape} {str(dtype).removeprefix('torch.')}"


def _times_of(
    products: Mapping[str, KernelWeight],
    dtype: torch.dtype,
    candidates: Sequence[Kernels],
    folder: str,
) -> dict[str, Times]:
    """Return the times of these products: those in the folder, and measured ones, which are added.

    Of several processes one measures, and the others wait. Raises OSError if times are missing in
    the folder and cannot be added.
    """
    path, machine = os.path.join(folder, TIMES_FILE), _machine(candidates)
    with locked(folder):
        machines = _read(path)
        known = machines.pop(machine, {})
        missing = {
            name: weight
            for name, weight in products.items()
            if not _is_complete(known.get(name, {}), candidates)
        }
        if missing:
            known |= measure(missing, dtype, candidates)
            kept = dict(list(machines.items())[1 - _MOST_MACHINES :])
            _write(path, ProductTimes({**kept, machine: known}))
    return known


def _is_complete(times: Times, candidates: Sequence[Kernels]) -> bool:
    names = [kernels.variant for kernels in candidates]
    return list(times) == names and all(
        len(of_rows) == len(ROWS) and min(of_rows) > 0 for of_rows in times.values()
    )


def _machine(candidates: Sequence[Kernels]) -> str:
    kernels = " ".join(f"{each.variant}-{each.digest}" for each in candidates)
    return f"{cpu_model_name()}, {torch.get_num_threads()} threads, {kernels}"


def measure(
    products: Mapping[str, KernelWeight], dtype: torch.dtype, candidates: Sequence[Kernels]
) -> dict[str, Times]:
    """Return the shortest times of samples of these products by each candidate, in turn.

    Processor time of one thread, which other programs disturb little: threads that wait for one
    another measure the load of the machine.
    """
    num_threads = torch.get_num_threads()
    samples = {name: _sample(weight, num_threads) for name, weight in products.items()}
    inputs = {
        columns: [torch.ones(num_rows, columns, dtype=dtype) for num_rows in ROWS]
        for columns in {weight.in_features for weight in samples.values()}
    }
    best = {
        name: {kernels.variant: [math.inf] * len(ROWS) for kernels in candidates}
        for name in samples
    }
    end = time.perf_counter() + _MEASURE_SECONDS
    torch.set_num_threads(1)
    try:
        for number in range(_ROUNDS + 1):
            if number > 1 and time.perf_counter() > end:
                break
            for name, weight in samples.items():
                for kernels in candidates:
                    weight.use_kernels(kernels)
                    times = [_nanoseconds(weight, x) for x in inputs[weight.in_features]]
                    if number:  # the first round is the warm-up
                        of_kernels = best[name][kernels.variant]
                        best[name][kernels.variant] = list(map(min, of_kernels, times))
    finally:
        torch.set_num_threads(num_threads)
    return {
        name: {variant: tuple(times) for variant, times in of_product.items()}
        for name, of_product in best.items()
    }


def _sample(weight: KernelWeight, num_threads: int) -> KernelWeight:
    """Return a weight with some of the rows that one of the threads multiplies."""
    most = min(weight.out_features // num_threads, _SAMPLE_NUMBERS // weight.in_features)
    return weight.zeros_like(max(32, most // 32 * 32))


def _nanoseconds(weight: KernelWeight, x: torch.Tensor) -> int:
    start = time.thread_time_ns()
    weight.multiply(x)
    return time.thread_time_ns() - start


def _read(path: str) -> dict[str, dict[str, Times]]:
    decoder: MessageDecoder[ProductTimes] = MessageDecoder(ProductTimes)
    try:
        with open(path, "rb") as file:
            return decoder.decode(file.read()).machines
    except (FileNotFoundError, ProtocolError):
        return {}


def _write(path: str, times: ProductTimes) -> None:
    workspace = f"{path}.{os.getpid()}"
    with open(workspace, "wb") as file:
        file.write(encode(times))
    os.replace(workspace, path)
