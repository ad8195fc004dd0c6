"""A breakdown of a step's time, and figures for planning optimisations."""

import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from tests.gpu.formulas import decode_floor
from tests.gpu.hardware import Hardware, hardware
from tests.gpu.models import BLOCK, DTYPE, Bench, eager_step, seconds_of_decode, step_inputs
from tests.gpu.random_model import random_decoder
from tests.gpu.report import Report
from tests.gpu.timing import read_rate
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.cuda.attention.flashinfer_schedule import DecodeSplits
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config

SHORT_DECODES = 33
UNEVEN_DECODES = 64


@torch.inference_mode()
def probe(report: Report) -> None:
    """Measure the parts of a step separately on the 8B model."""
    gpu = hardware()
    with report.part("copies of blocks"):
        block_copies(report, gpu)
    spec = spec_from_config(gpu.sizes.configs["8B"])
    decoder = random_decoder(spec, DTYPE, gpu.gpu)
    with report.part("graphs"):
        graph_step(report, gpu, decoder)
    with report.part("a mixed step"):
        mixed_step(report, gpu, decoder)


@torch.inference_mode()
def splits(report: Report) -> None:
    """Decodes of unequal contexts on the 8B model, and the splits of FlashInfer's own planner."""
    gpu = hardware()
    decoder = random_decoder(spec_from_config(gpu.sizes.configs["8B"]), DTYPE, gpu.gpu)
    uneven_contexts(report, gpu, decoder)


def block_copies(report: Report, gpu: Hardware) -> None:
    """Time of copies of 8-bit KV blocks as in forks; the copies must be equal."""
    spec = spec_from_config(gpu.sizes.configs["8B"])
    layout = kv_layout(spec.windows)
    dtype = torch.float8_e4m3fn
    heads = spec.attention_shape
    geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, dtype)
    count = gpu.sizes.copied_blocks
    cache = KVCache(geometry, layout, 2 * count, BLOCK, gpu.gpu.zeros)
    raw = cache.buffer.view(torch.uint8)
    raw.random_(0, 256)
    blocks = torch.arange(2 * count, device=gpu.device)
    seconds = gpu.median_seconds(lambda: cache.copy_blocks(blocks[:count], blocks[count:]), 5)
    report.figure("8-bit blocks copied, GB/s", 2 * raw[:count].nbytes / seconds / 1e9)
    fetch = gpu.accelerator().fetch
    if not torch.equal(fetch(raw[:count]), fetch(raw[count:])):
        report.error("copies of 8-bit blocks differ from them")


def graph_step(report: Report, gpu: Hardware, decoder: Decoder) -> None:
    """Seconds to capture a graph, and the kernels of one of 64 decodes."""
    sizes, context = gpu.sizes.captured, max(gpu.sizes.contexts)
    for size in sizes:
        bench = Bench(gpu, decoder, size * -(-context // BLOCK) * BLOCK, (size,), context)
        started = time.monotonic()
        graphs = bench.graphs((size,), context)
        gpu.synchronize()
        report.figure(f"graph of {size} captured in s", time.monotonic() - started)
        inputs = step_inputs([context] * size, [1] * size)
        token_ids, positions, _ = bench.sent(inputs)
        replay = partial(graphs.replay, inputs.attention, token_ids, positions)

        def step(replay: Callable[[], torch.Tensor] = replay) -> torch.Tensor:
            return decoder.logits(replay()).argmax(dim=1)

        report.figure(f"step of {size} decodes, µs", gpu.kernel_times(step))


def mixed_step(report: Report, gpu: Hardware, decoder: Decoder) -> None:
    """Time by kernel of a mixed step."""
    batch, context, prompt = gpu.sizes.batch // 2, max(gpu.sizes.contexts), gpu.sizes.input
    lengths, new = [context] * batch + [prompt], [1] * batch + [prompt]
    bench = Bench(gpu, decoder, sum(-(-each // BLOCK) * BLOCK for each in lengths))
    step = eager_step(bench, lengths, new)
    report.figure("mixed step, ms", gpu.median_seconds(step, rounds=10) * 1e3)
    report.figure("mixed step, µs", gpu.kernel_times(step))


def uneven_contexts(report: Report, gpu: Hardware, decoder: Decoder) -> None:
    """Time of decodes whose contexts differ, and its share of the lower bound.

    Batches that are split are also measured as FlashInfer would split them by itself.
    """
    short, long = min(gpu.sizes.contexts), gpu.sizes.long_context
    uniform = np.linspace(*gpu.sizes.uneven_contexts, UNEVEN_DECODES, dtype=int)
    # In the order of a batch, which is not that of lengths.
    uneven = np.random.default_rng(0).permutation(uniform).tolist()
    first, last = gpu.sizes.uneven_contexts
    rate = read_rate(gpu)
    for name, contexts in {
        f"{SHORT_DECODES + 1} decodes of {short}": [short] * (SHORT_DECODES + 1),
        f"one of them of {long}": [long] + [short] * SHORT_DECODES,
        f"one decode of {long}": [long],
        f"{UNEVEN_DECODES} decodes of {first} to {last}": uneven,
    }.items():
        floor = decode_floor(decoder.spec, contexts, rate)
        seconds = seconds_of_decode(gpu, decoder, contexts)
        report.figure(name, {"ms": seconds * 1e3, "share": floor / seconds})
        if len(set(contexts)) > 1:
            with patch.object(DecodeSplits, "chunk_pages", return_value=None):
                seconds = seconds_of_decode(gpu, decoder, contexts)
            by_library = {"ms": seconds * 1e3, "share": floor / seconds}
            report.figure(f"{name}, split by the library", by_library)
