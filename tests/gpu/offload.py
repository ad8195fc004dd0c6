"""Copies of KV offloading between a GPU and host memory, against one large copy."""

import time
from collections.abc import Callable

import torch

from proto.messages.kv_connector import DeviceBlocks, TransferJob
from tests.gpu.hardware import Hardware, hardware, rehearsing
from tests.gpu.models import BLOCK, DTYPE
from tests.gpu.report import Report, demand
from worker.attention.kv_cache import KVCache
from worker.kv_connector.offload.base import HandlerContext, OffloadingHandler
from worker.models.registry import spec_from_config
from worker.plan.memory_plan import layer_cache

SHARE = 0.8
"""Of the rate of one copy of page-locked memory, each way."""
_WAIT_SECONDS = 20.0


@torch.inference_mode()
def copies(report: Report) -> None:
    """Store blocks of the 8B model's cache, load them into others, and compare their content."""
    gpu = hardware()
    count = gpu.sizes.copied_blocks // 2
    layout, geometry = layer_cache(spec_from_config(gpu.sizes.configs["8B"]), DTYPE)
    cache = KVCache(geometry, layout, 1 + 2 * count, BLOCK, gpu.gpu.zeros)
    rows = cache.block_rows()
    rows.random_(0, 256)
    num_bytes = count * rows.shape[1]
    context = HandlerContext(cache, gpu.gpu, 1, 0, 1, bytes(32), lambda: None)
    store, load = gpu.block_copies(rows, num_bytes, context)
    try:
        blocks = torch.randperm(2 * count)[:count].add_(1).tolist()
        others = [block for block in range(1, 1 + 2 * count) if block not in set(blocks)]
        slots = torch.randperm(count).tolist()
        wanted = gpu.accelerator().fetch(rows)[blocks]
        for name, handler, ids, is_load in (
            ("store", store, blocks, False),
            ("load", load, others, True),
        ):
            rates = []
            for turn in range(3):
                job = TransferJob(turn, "CPU", is_load, [DeviceBlocks(0, ids)], [slots])
                rates.append(num_bytes / _seconds(gpu, handler, job))
            whole = _whole_copy(gpu, num_bytes, to_device=is_load)
            share = max(rates) / whole
            report.figure(
                f"{name} of {count} blocks",
                {"GB/s": max(rates) / 1e9, "one copy, GB/s": whole / 1e9, "share": share},
            )
            if share < SHARE:
                report.miss(f"{name}: {share:.2f} of one copy, wanted {SHARE}")
        found = gpu.accelerator().fetch(rows)[others]
        same = int((found == wanted).all(dim=1).sum())
        report.figure("blocks that came back", f"{same} of {count}")
        demand(same == count, f"{count - same} of {count} blocks have other bytes")
    finally:
        store.close()
        load.close()


def _seconds(gpu: Hardware, handler: OffloadingHandler, job: TransferJob) -> float:
    """Return the time of a copy, from its start to its end on the device."""
    gpu.synchronize()
    started = time.perf_counter()
    handler.transfer_async(job)
    handler.wait({job.job_id})
    seconds = time.perf_counter() - started
    results = handler.get_finished()
    demand([result.succeeded for result in results] == [True], f"a copy failed: {results}")
    return seconds


def _whole_copy(gpu: Hardware, num_bytes: int, *, to_device: bool) -> float:
    """Return the bytes per second of one copy between page-locked and device memory."""
    accelerator = gpu.accelerator()
    host = accelerator.pinned(num_bytes)
    device = accelerator.zeros(num_bytes, torch.uint8)
    source, target = (host, device) if to_device else (device, host)
    if rehearsing():
        return float("inf")

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    run: Callable[[], object] = copy
    return num_bytes / gpu.median_seconds(run, rounds=5)
