"""Measure the matrix products of one step of a model, by weight format and number of rows.

`python -m tests.benchmarks.products_by_format [--rows 1 16 …] [--threads N] [--types [TYPE …]]`: of
SmolLM2-135M with embedding and head, or with --types of eight layers of Llama 3.2 1B in types of
blocks and in FP8, all of them if none is named. Weights are random; every layer has its own, so
that they are read from memory as in a step. The formats alternate within each round, and the best
round of each is shown, with the memory bandwidth and the time to read the bytes of each format.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from tests.fakes.devices import CPU
from worker.cpu.kernels import Kernels, load_kernels
from worker.cpu.weights import Bf16Weight, Fp8Weight, KernelWeight, PackedWeight, RotatedWeight
from worker.host.large_pages import large_pages
from worker.loader.block_types import BLOCK_TYPES

LAYERS: Final = 30
LAYER_SHAPES: Final = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD_SHAPE: Final = (49152, 576)

LARGE_LAYERS: Final = 8
LARGE_SHAPES: Final = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
"""Half the layers of Llama 3.2 1B."""
LARGE_TYPES: Final = ("Q4_K", *(name for name in BLOCK_TYPES if name != "Q4_K"), "FP8")

Step = Callable[[dict[int, torch.Tensor]], None]


class Form:
    """All weights of the model in one format: a step over them, and their bytes."""

    def __init__(self, name: str, step: Step, nbytes: int) -> None:
        self.name = name
        self.step = step
        self.nbytes = nbytes


def packed_form(kernels: Kernels, layer_type: str, head_type: str) -> Form:
    """Packed weights."""
    weights = [
        _packed(kernels, block_type, shape)
        for block_type, shapes in ((layer_type, LAYER_SHAPES * LAYERS), (head_type, (HEAD_SHAPE,)))
        for shape in shapes
    ]

    def step(inputs: dict[int, torch.Tensor]) -> None:
        for weight in weights:
            weight.multiply(inputs[weight.in_features])

    return Form(f"{layer_type}, head {head_type}", step, sum(each.nbytes for each in weights))


def type_form(kernels: Kernels, block_type: str) -> Form:
    """Layers of the larger model in blocks of one type."""
    weights = [_packed(kernels, block_type, shape) for shape in LARGE_SHAPES * LARGE_LAYERS]

    def step(inputs: dict[int, torch.Tensor]) -> None:
        for weight in weights:
            weight.multiply(inputs[weight.in_features])

    return Form(block_type, step, sum(each.nbytes for each in weights))


def rotated_form(kernels: Kernels) -> Form:
    """Rotated weights of 8 bits, except the head, which this format does not support."""
    weights = [
        RotatedWeight.from_dense(kernels, torch.randn(shape)) for shape in LAYER_SHAPES * LAYERS
    ]

    def step(inputs: dict[int, torch.Tensor]) -> None:
        for weight in weights:
            weight.multiply(inputs[weight.in_features])

    return Form("rotated, no head", step, sum(each.nbytes for each in weights))


def head_form(kernels: Kernels) -> Form:
    """The head alone, in blocks of 8 bits."""
    head = _packed(kernels, "Q8_0", HEAD_SHAPE)

    def step(inputs: dict[int, torch.Tensor]) -> None:
        head.multiply(inputs[head.in_features])

    return Form("head Q8_0 alone", step, head.nbytes)


def _packed(kernels: Kernels, block_type: str, shape: tuple[int, int]) -> KernelWeight:
    if block_type == "FP8":
        return _fp8(kernels, shape)
    if block_type == "Q8_0":
        return PackedWeight.from_dense(kernels, torch.randn(shape))
    num_bytes = BLOCK_TYPES[block_type][1] * shape[0] * shape[1] // BLOCK_TYPES[block_type][0]
    raw = np.full(num_bytes, 0x22, dtype=np.uint8)  # as a float16 scale: 0.012
    weight = PackedWeight(kernels, block_type, shape)
    weight.put_blocks(0, raw)
    return weight


def _fp8(kernels: Kernels, shape: tuple[int, int]) -> Fp8Weight:
    """Return a weight with a scale for each block of 128 x 128."""
    weight = Fp8Weight(kernels, shape, 128, wide=True)
    codes = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)  # most are far from 448
    weight.put_rows(0, codes, torch.full((shape[0], shape[1] // 128), 0.01))
    return weight


def bf16_form(kernels: Kernels) -> Form:
    """bfloat16 in our panel layout."""
    shapes = (*LAYER_SHAPES * LAYERS, HEAD_SHAPE)
    weights = [Bf16Weight.from_dense(kernels, torch.randn(shape).bfloat16()) for shape in shapes]

    def step(inputs: dict[int, torch.Tensor]) -> None:
        for weight in weights:
            weight.multiply(inputs[weight.in_features])

    return Form("bf16 in panels", step, sum(each.nbytes for each in weights))


def dense_form(dtype: torch.dtype) -> Form:
    """Dense weights, as the worker stores them without kernels."""
    shapes = (*LAYER_SHAPES * LAYERS, HEAD_SHAPE)
    linears = [(shape[1], CPU.linear(torch.randn(shape).to(dtype))) for shape in shapes]

    def step(inputs: dict[int, torch.Tensor]) -> None:
        for in_features, linear in linears:
            linear(inputs[in_features])

    nbytes = sum(shape[0] * shape[1] for shape in shapes) * dtype.itemsize
    return Form(f"{dtype}".removeprefix("torch."), step, nbytes)


def best_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def read_rate() -> float:
    """Return bytes per second read by all threads together, best of some passes over 512 MiB."""
    memory = large_pages(1 << 29).view(torch.float32).fill_(1.0)
    return memory.nbytes / min(best_ms(memory.sum) for _ in range(8)) * 1e3


def measure(forms: list[Form], num_rows: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of a step, by format."""
    widths = {shape[1] for shape in (*LAYER_SHAPES, *LARGE_SHAPES)}
    inputs = {width: torch.randn(num_rows, width).bfloat16() for width in widths}
    times: dict[str, float] = {}
    for _ in range(rounds):
        for form in forms:
            form.step(inputs)  # warm-up of the threads
            taken = best_ms(lambda form=form: form.step(inputs))  # type: ignore[misc]
            times[form.name] = min(taken, times.get(form.name, taken))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.products_by_format")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--types", nargs="*", choices=LARGE_TYPES, metavar="TYPE")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = load_kernels()
    if options.types is not None:
        forms = [type_form(kernels, each) for each in options.types or LARGE_TYPES]
    else:
        forms = [
            dense_form(torch.bfloat16),
            bf16_form(kernels),
            packed_form(kernels, "Q4_1", "Q8_0"),
            packed_form(kernels, "Q5_0", "Q8_0"),
            packed_form(kernels, "Q8_0", "Q8_0"),
            rotated_form(kernels),
            head_form(kernels),
        ]
    rate = read_rate()
    print(f"kernels {kernels.variant}, {options.threads} threads, read {rate / 1e9:.1f} GB/s")
    print(f"{'ms a step, rows':>22}", *(f"{form.name:>18}" for form in forms))
    limits = {form.name: form.nbytes / rate * 1e3 for form in forms}
    print(f"{'read alone':>22}", *(f"{limit:18.2f}" for limit in limits.values()))
    steps = {}
    for num_rows in options.rows:
        steps[num_rows] = measure(forms, num_rows, options.rounds)
        print(f"{num_rows:>22}", *(f"{steps[num_rows][form.name]:18.2f}" for form in forms))
    if options.json:
        report = {
            "variant": kernels.variant,
            "threads": options.threads,
            "read_bytes_per_s": rate,
            "weight_bytes": {form.name: form.nbytes for form in forms},
            "read_limit_ms": limits,
            "step_ms_by_rows": steps,
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
