"""Measure the mixture of experts of one layer, beside reading the weights that it needs.

`python -m tests.benchmarks.mixtures [--rows 1 64 …] [--type Q4_K] [--threads N]`. The shape is that
of OLMoE-1B-7B by default: more bytes than caches hold. Rows are random, so their experts are too;
each time has other rows. "read" is the time to read the weights of the experts that the rows chose.
"""

import argparse
import time

import numpy as np
import torch

from tests.benchmarks.products_by_format import read_rate
from worker.cpu.kernels import Kernels, load_kernels
from worker.cpu.layers import kernel_gate
from worker.cpu.linear import KernelLinear
from worker.cpu.moe import KernelMoe
from worker.cpu.weights import Bf16Weight, KernelWeight, PackedWeight
from worker.layers.experts import Expert, LinearExperts
from worker.layers.router import Router, RouterSpec
from worker.layers.scratch import ByteBuffer
from worker.loader.block_types import BLOCK_TYPES
from worker.models.moe import Mixture, MoeSpec


def random_weight(kernels: Kernels, kind: str, shape: tuple[int, int]) -> KernelWeight:
    """Return a weight [out, in] of a GGUF type or of bfloat16, whose numbers are alike."""
    if kind == "BF16":
        return Bf16Weight.from_dense(kernels, torch.randn(shape).bfloat16())
    size, num_bytes = BLOCK_TYPES[kind]
    weight = PackedWeight(kernels, kind, shape)
    weight.put_blocks(0, np.full(shape[0] * shape[1] // size * num_bytes, 0x22, dtype=np.uint8))
    return weight


def mixture(kernels: Kernels, options: argparse.Namespace) -> tuple[Mixture, int]:
    """Return a mixture with random weights, and the bytes of one expert."""
    hidden, inner = options.hidden, options.inner
    experts, num_bytes = [], 0
    for _ in range(options.experts):
        gate_up = random_weight(kernels, options.type, (2 * inner, hidden))
        down = random_weight(kernels, options.type, (hidden, inner))
        num_bytes = gate_up.nbytes + down.nbytes
        experts.append(Expert(KernelLinear([gate_up], None), KernelLinear([down], None)))
    router = RouterSpec(num_experts=options.experts, top_k=options.top_k)
    spec = MoeSpec(hidden_size=hidden, intermediate_size=inner, router=router)
    whole = Mixture(
        spec=spec,
        router=Router(router, torch.randn(options.experts, hidden)),
        experts=LinearExperts(experts, kernel_gate(kernels, "silu")),
        shared=None,
        shared_gate=None,
    )
    return whole, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.mixtures")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--type", choices=["BF16", *BLOCK_TYPES], default="Q4_K")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each number of rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels, memory = load_kernels(), ByteBuffer()
    whole, expert_bytes = mixture(kernels, options)
    assert isinstance(whole.experts, LinearExperts)
    kernel, rate = KernelMoe(kernels, whole, whole.experts), read_rate()
    print(f"{kernels.variant}, {options.threads} threads, {expert_bytes / 1e6:.2f} MB an expert")
    print(f"memory: {rate / 1e9:.1f} GB/s")
    print(f"{'rows':>5} {'experts':>8} {'read ms':>9} {'ms':>9} {'of read':>8} {'GFLOP/s':>8}")
    flops = 6 * options.hidden * options.inner * options.top_k
    for num_rows in options.rows:
        read_ms, best = 0.0, float("inf")
        end = time.perf_counter() + options.seconds
        while time.perf_counter() < end:
            x = torch.randn(num_rows, options.hidden).bfloat16()
            _, chosen = whole.router(x)
            count = len(chosen.unique())  # type: ignore[no-untyped-call]
            output = torch.empty_like(x)
            start = time.perf_counter()
            kernel.run(x, output, adds=False, memory=memory)
            taken = (time.perf_counter() - start) * 1e3
            if taken < best:
                best, read_ms, num_read = taken, count * expert_bytes / rate * 1e3, count
        share, speed = best / read_ms, flops * num_rows / best / 1e6
        print(
            f"{num_rows:>5} {num_read:>8} {read_ms:>9.2f} {best:>9.2f} {share:>8.2f} {speed:>8.0f}"
        )


if __name__ == "__main__":
    main()
