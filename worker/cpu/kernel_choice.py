"""Which kernels compute products and attention: those that take the least time here.

Libraries for several instruction sets can compute the same (kernels.py:candidate_kernels).
Each distinct product of a model, and its attention, is timed once with all of them. The times are
kept in the prepared folder for later starts, replacement workers, replicas and ranks, which all
choose alike.

A choice holds for every number of rows, because bits depend on it. oneDNN is no candidate: its bits
depend on the number of rows.
"""

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch

from proto.messages.prepared_model import KernelTimes
from worker.attention.backend import AttentionInputs, AttentionShape
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.cpu.attention import CpuAttention, UnsupportedShapeError
from worker.cpu.kernels import Kernels, candidate_kernels
from worker.cpu.weights import KernelWeight
from worker.host.device import cpu_model_name
from worker.loader.kept_file import locked, read_kept, write_kept
from worker.loader.kernel_choices import KernelChoice, describe_choices

TIMES_FILE: Final = "kernel_times.msgpack"
ROWS: Final = (1, 64)
"""Rows that are timed: a token alone, and a full batch or a part of a prompt."""
LEAST_GAIN: Final = 0.05
"""Share of the time that other kernels must save to replace the default ones."""
_SAMPLE_NUMBERS: Final = 1 << 18
"""Numbers of a weight, or of K, that are timed: they stay in the L2 cache. Reading from memory
takes the same time for all kernels, or hides what they differ in."""
_MOST_CONTEXT: Final = 1024
_BLOCK_SIZE: Final = 16
_ROUNDS: Final = 6
_PRODUCT_SECONDS: Final = 0.2
"""Time after which no further round of a model's products begins."""
_ATTENTION_SECONDS: Final = 0.05
_MOST_MACHINES: Final = 16
logger = logging.getLogger("tokend.kernels")

Times = dict[str, tuple[float, ...]]
"""Nanoseconds of one thread by variant, for each of ROWS."""


KernelSample = Callable[[Kernels, int], Callable[[], object]]
"""Work that every candidate library can do, a product or attention: takes the kernels and a number
of rows, and returns a function that computes these rows."""


def choose_products(
    weights: Sequence[KernelWeight], dtype: torch.dtype, folder: str
) -> list[KernelChoice]:
    """Let the fastest kernels multiply with each weight; log and return the choices.

    dtype: of the activations. folder: of the prepared model. Without the right to write there,
    the default kernels multiply, so that all workers choose alike.
    """
    samples = {
        product_name(weight, dtype): partial(share_sample, weight, dtype) for weight in weights
    }
    choices = _choose_kernels("products", samples, folder, _PRODUCT_SECONDS)
    if choices:
        by_name = {kernels.variant: kernels for kernels in candidate_kernels()}
        variants = {choice.name: choice.variant for choice in choices}
        for weight in weights:
            weight.use_kernels(by_name[variants[product_name(weight, dtype)]])
    return choices


def choose_attention(
    shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype, folder: str
) -> tuple[Kernels | None, list[KernelChoice]]:
    """Return the fastest kernels for attention with these heads, and the choice, which is logged.

    None for the default ones: there is nothing to choose, or times cannot be kept in `folder`.
    dtype: of the activations. kv_dtype: of the KV cache.
    """
    name = attention_name(shape, dtype, kv_dtype)
    sample = attention_sample(shape, dtype, kv_dtype)
    try:
        choices = _choose_kernels("attention", {name: lambda: sample}, folder, _ATTENTION_SECONDS)
    except UnsupportedShapeError:
        return None, []
    by_name = {kernels.variant: kernels for kernels in candidate_kernels()} if choices else {}
    return (by_name[choices[0].variant] if choices else None), choices


def choose(name: str, times: Times) -> KernelChoice:
    """Return the choice by the times of all candidates, the first of which is the default."""
    means = {variant: statistics.geometric_mean(of_rows) for variant, of_rows in times.items()}
    default, fastest = next(iter(means)), min(means, key=means.__getitem__)
    variant = fastest if means[fastest] < means[default] * (1 - LEAST_GAIN) else default
    return KernelChoice(name, variant, {other: means[other] / means[fastest] for other in means})


def product_name(weight: KernelWeight, dtype: torch.dtype) -> str:
    """Return the type and shape of a weight and the dtype of the activations: what is timed."""
    return f"{weight.type_name} {weight.out_features}x{weight.in_features} {_name_of(dtype)}"


def attention_name(shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Return the heads, the dtype of the activations and that of the cache: what is timed."""
    heads = f"{shape.group_size}x{shape.head_dim}"
    if shape.latent_dim:
        heads += f"-{shape.latent_dim}"
    extras = " capped" * bool(shape.soft_cap) + " bidirectional" * shape.bidirectional
    return f"attention {heads} {_name_of(dtype)} {_name_of(kv_dtype)}{extras}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def share_sample(weight: KernelWeight, dtype: torch.dtype) -> KernelSample:
    """Return products with some of the rows that one of the threads multiplies, all zero."""
    share = weight.out_features // torch.get_num_threads()
    most = min(share, _SAMPLE_NUMBERS // weight.in_features)
    zeros = weight.zeros_like(max(32, most // 32 * 32))

    def call(kernels: Kernels, num_rows: int) -> Callable[[], object]:
        x = torch.ones(num_rows, zeros.in_features, dtype=dtype)

        def multiply() -> torch.Tensor:
            zeros.use_kernels(kernels)
            return zeros.multiply(x)

        return multiply

    return call


def attention_sample(
    shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype
) -> KernelSample:
    """Return attention with rows of one sequence under one KV head, on zeros.

    Bidirectional attention sees the rows alone. A call raises UnsupportedShapeError if the kernels
    do not support the heads.
    """
    shape = replace(shape, num_heads=shape.group_size, num_kv_heads=1)
    layout, num_parts = kv_layout([None]), 1 if shape.latent_dim else 2
    geometry = kv_cache_geometry(layout, 1, shape.head_dim, kv_dtype, num_parts)

    def call(kernels: Kernels, num_rows: int) -> Callable[[], object]:
        context = num_rows
        if not shape.bidirectional:
            context = max(num_rows, min(_MOST_CONTEXT, _SAMPLE_NUMBERS // shape.head_dim))
        blocks = np.arange(-(-context // _BLOCK_SIZE), dtype=np.int32)
        cache = KVCache(geometry, layout, len(blocks), _BLOCK_SIZE)
        attention = CpuAttention(kernels, cache, shape)
        inputs = AttentionInputs(
            query_start=np.array([0, num_rows], dtype=np.int32),
            seq_lens=np.array([context], dtype=np.int32),
            block_table=blocks[None],
            slot_mapping=np.arange(context - num_rows, context, dtype=np.int64),
        )
        attention.plan([inputs])
        query = torch.ones(num_rows, shape.num_heads, shape.head_dim, dtype=dtype)
        key = query[:, :1].contiguous()
        value = None if shape.latent_dim else key.clone()
        rotation = torch.zeros(num_rows, 2, shape.rotary_dim // 2)
        return partial(attention.run, 0, query, key, value, rotation)

    return call


def _choose_kernels(
    what: str, samples: Mapping[str, Callable[[], KernelSample]], folder: str, seconds: float
) -> list[KernelChoice]:
    """Choose for each of the samples; log and return the choices: none without candidates.

    Nothing is chosen, with a warning, where times cannot be kept.
    """
    if not samples or len(candidates := candidate_kernels()) < 2:
        return []
    try:
        times = _times_of(samples, candidates, folder, seconds)
    except OSError as error:
        logger.warning(
            "%s by %s: times cannot be kept: %s", what, candidates[0].variant, error.strerror
        )
        return []
    choices = [choose(name, times[name]) for name in samples]
    logger.info("%s by time: %s", what, describe_choices(choices))
    return choices


def _times_of(
    samples: Mapping[str, Callable[[], KernelSample]],
    candidates: Sequence[Kernels],
    folder: str,
    seconds: float,
) -> dict[str, Times]:
    """Return the times of these samples: those in the folder, and measured ones, which are added.

    Of several processes one measures, and the others wait. Raises OSError if times are missing in
    the folder and cannot be added.
    """
    path, machine = os.path.join(folder, TIMES_FILE), _machine(candidates)
    with locked(folder):
        kept_times = read_kept(path, KernelTimes)
        machines = {} if kept_times is None else kept_times.machines
        known = machines.pop(machine, {})
        missing = {
            name: sample()
            for name, sample in samples.items()
            if not _is_complete(known.get(name, {}), candidates)
        }
        if missing:
            known |= measure(missing, candidates, seconds)
            kept = dict(list(machines.items())[1 - _MOST_MACHINES :])
            write_kept(path, KernelTimes({**kept, machine: known}))
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
    samples: Mapping[str, KernelSample], candidates: Sequence[Kernels], seconds: float
) -> dict[str, Times]:
    """Return the shortest times of these samples by each candidate, in turn.

    Processor time of one thread, which other programs disturb little: threads that wait for one
    another measure the load of the machine. seconds: after them no further round begins.
    """
    num_threads = torch.get_num_threads()
    best = {
        name: {kernels.variant: [math.inf] * len(ROWS) for kernels in candidates}
        for name in samples
    }
    torch.set_num_threads(1)
    try:
        calls = {
            (name, kernels.variant): [sample(kernels, num_rows) for num_rows in ROWS]
            for name, sample in samples.items()
            for kernels in candidates
        }
        end = time.perf_counter() + seconds
        for number in range(_ROUNDS + 1):
            if number > 1 and time.perf_counter() > end:
                break
            for (name, variant), of_rows in calls.items():
                times = [_nanoseconds(call) for call in of_rows]
                if number:  # the first round is the warm-up
                    best[name][variant] = list(map(min, best[name][variant], times))
    finally:
        torch.set_num_threads(num_threads)
    return {
        name: {variant: tuple(times) for variant, times in of_sample.items()}
        for name, of_sample in best.items()
    }


def _nanoseconds(call: Callable[[], object]) -> int:
    start = time.thread_time_ns()
    call()
    return time.thread_time_ns() - start
