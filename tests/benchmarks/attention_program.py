"""Reads workloads from stdin and prints their timings, one JSON line each, until EOF.
 Measures what a layer does between its
projections: rotary embedding, KV write, attention. Every round reads a large array
right after the step, so that whatever else the machine does disturbs both.
"""

import statistics
import sys
from time import perf_counter

import numpy as np
import torch

from proto.codec import from_json, to_json_line
from proto.settings.config import DeviceConfig
from tests.benchmarks.messages import AttentionTimings, AttentionWorkload
from worker.attention.backend import AttentionInputs, AttentionShape
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout, resolve_kv_dtype
from worker.cpu.attention import CpuAttention
from worker.cpu.device import CpuDevice
from worker.cpu.kernels import load_kernels
from worker.host.large_pages import large_pages
from worker.models.rope import DefaultRope
from worker.models.rotary import RotaryEmbedding


class AttentionStep:
    """A workload with a filled cache; `run` computes the step."""

    def __init__(self, workload: AttentionWorkload) -> None:
        self._workload = workload
        dtype: torch.dtype = getattr(torch, workload.dtype)
        self._cache = _full_cache(workload, dtype)
        self._inputs = _inputs(workload, self._cache.num_blocks)
        kernels = load_kernels()
        self.kernels = kernels.variant
        heads, kv_heads, head_dim = workload.num_heads, workload.num_kv_heads, workload.head_dim
        shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5)
        self._attention = CpuAttention(kernels, self._cache, shape)
        tokens = workload.num_seqs * workload.query_tokens
        fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
        self._query, self._key, self._value = fused.tensor_split((heads, heads + kv_heads), dim=1)
        rotary = RotaryEmbedding(
            DefaultRope(10_000.0), head_dim, workload.context_tokens, torch.device("cpu")
        )
        positions = np.arange(
            workload.context_tokens - workload.query_tokens, workload.context_tokens
        )
        self._rotation = rotary.at(torch.from_numpy(np.tile(positions, workload.num_seqs)))

    @property
    def kv_bytes(self) -> int:
        """Bytes of all tokens in the cache that the step reads."""
        workload = self._workload
        return workload.num_seqs * workload.context_tokens * self._cache.geometry.bytes_per_token

    @property
    def num_operations(self) -> int:
        """Return the floating-point operations of both products."""
        workload = self._workload
        new, total = workload.query_tokens, workload.context_tokens
        pairs = workload.num_seqs * sum(range(total - new + 1, total + 1))
        return 4 * pairs * workload.num_layers * workload.num_heads * workload.head_dim

    def run(self) -> None:
        """Run one step, planned once as in the daemon."""
        self._attention.plan([self._inputs])
        for layer in range(self._workload.num_layers):
            self._attention.run(layer, self._query, self._key, self._value, self._rotation)


def _full_cache(workload: AttentionWorkload, dtype: torch.dtype) -> KVCache:
    layout = kv_layout([None] * workload.num_layers)
    kv_dtype = resolve_kv_dtype(workload.kv_cache_dtype, dtype, workload.head_dim)
    geometry = kv_cache_geometry(layout, workload.num_kv_heads, workload.head_dim, kv_dtype)
    pages = -(-workload.context_tokens // workload.block_size)
    cache = KVCache(geometry, layout, workload.num_seqs * pages + 1, workload.block_size)
    tokens = torch.randn(workload.block_size, workload.num_kv_heads, workload.head_dim)
    for layer in range(workload.num_layers):
        for part in cache.layer_pages(layer):
            part.write(torch.arange(workload.block_size), tokens)
    cache.buffer[1:] = cache.buffer[0]
    return cache


def _inputs(workload: AttentionWorkload, num_blocks: int) -> AttentionInputs:
    """Return inputs of sequences of equal length with random blocks in the cache."""
    num_seqs, size, new = workload.num_seqs, workload.block_size, workload.query_tokens
    blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
    table = blocks.reshape(num_seqs, -1)
    position = np.arange(workload.context_tokens - new, workload.context_tokens)
    slots = table[:, position // size].astype(np.int64) * size + position % size
    return AttentionInputs(
        query_start=np.arange(num_seqs + 1, dtype=np.int32) * new,
        seq_lens=np.full(num_seqs, workload.context_tokens, dtype=np.int32),
        block_table=table,
        slot_mapping=slots.reshape(-1),
    )


@torch.inference_mode()
def play(workload: AttentionWorkload) -> AttentionTimings:
    """Measure one workload."""
    threads = CpuDevice(DeviceConfig(cpu_threads=workload.num_threads)).num_threads
    torch.set_num_threads(threads)
    step = AttentionStep(workload)
    # the same kind of pages as K and V
    array = large_pages(workload.read_megabytes << 20).view(torch.float32).fill_(1.0)
    steps, rates = [], []
    for number in range(workload.rounds + 1):
        started = perf_counter()
        step.run()
        between = perf_counter()
        array.sum()
        ended = perf_counter()
        if number:  # the first round is the warm-up
            steps.append(between - started)
            rates.append(array.nbytes / (ended - between) / 1e9)
    gigabytes = step.kv_bytes / 1e9
    shares = [gigabytes / seconds / rate for seconds, rate in zip(steps, rates, strict=True)]
    median = statistics.median(steps)
    return AttentionTimings(
        workload=workload.name,
        kernels=step.kernels,
        num_threads=threads,
        step_ms_best=min(steps) * 1e3,
        step_ms_median=median * 1e3,
        kv_megabytes=gigabytes * 1e3,
        kv_gb_per_s_best=gigabytes / min(steps),
        kv_gb_per_s_median=gigabytes / median,
        read_gb_per_s_best=max(rates),
        read_gb_per_s_median=statistics.median(rates),
        share_of_read_median=statistics.median(shares),
        attention_gflop_per_s_best=step.num_operations / min(steps) / 1e9,
    )


def main() -> None:
    """Run workloads until EOF."""
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(to_json_line(play(from_json(line, AttentionWorkload))))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
