"""The medium that is host memory: a pool of slots in each worker, and who copies.

    cpu_bytes_to_use    [ slot 0: factor blocks | slot 1 | … ]     of each rank its own blocks

On a CPU the pool is a map of memory that is committed in idle moments, ahead of the copies; on a
GPU it is page-locked at once, so that the device copies by itself.
"""

from collections.abc import Mapping
from typing import Any

import torch

from proto.host_resources import available_memory
from proto.kv_events import DEVICE_MEDIUM
from proto.kv_transfer_config import cpu_settings, wrong
from worker.device.accelerator import Cuda
from worker.device.copy_stream import CudaCopyStream
from worker.kv_cache import KVCache
from worker.kv_connector.offload.base import HandlerContext, OffloadingHandler
from worker.kv_connector.offload.commit_ahead import CommitAhead
from worker.kv_connector.offload.device_copies import DeviceCopies, ThreadWatcher
from worker.kv_connector.offload.host_copies import LOAD_NICENESS, STORE_NICENESS, HostCopies
from worker.kv_connector.offload.specs import Direction
from worker.large_pages import large_pages

_HOST = "CPU"


def make_handlers(
    extra: Mapping[str, Any], context: HandlerContext
) -> Mapping[Direction, OffloadingHandler]:
    """Copies to and from host memory; raises ConfigError where there is not so much of it."""
    num_bytes = cpu_settings(extra).cpu_bytes_to_use
    free = available_memory()
    if num_bytes > free:
        raise wrong(
            "cpu_bytes_to_use",
            f"is more than the {free} bytes of memory that are free: {num_bytes}",
        )
    blocks = block_rows(context.cache)
    block_bytes = blocks.shape[1]
    if blocks.device.type == "cpu":
        # Ranks have different numbers of heads; the ledger alone says how much is used.
        memory = large_pages(num_bytes)
        ahead = CommitAhead(memory[: num_bytes // context.num_ranks])
        pool = pool_rows(memory, context.factor, block_bytes)
        return _both(
            HostCopies(blocks.numpy(), pool.numpy(), context.notify, STORE_NICENESS, ahead.close),
            HostCopies(blocks.numpy(), pool.numpy(), context.notify, LOAD_NICENESS),
        )
    memory = Cuda(blocks.device).staging(num_bytes // context.num_ranks)
    pool = pool_rows(memory, context.factor, block_bytes)
    store, load = (
        DeviceCopies(blocks, pool, CudaCopyStream(blocks.device), ThreadWatcher(context.notify))
        for _ in range(2)
    )
    return _both(store, load)


def block_rows(cache: KVCache) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes]: blocks of all groups, scales included, as they lie."""
    return cache.buffer.view(cache.num_blocks, -1).view(torch.uint8)


def pool_rows(memory: torch.Tensor, factor: int, block_bytes: int) -> torch.Tensor:
    """uint8 [num_slots, factor, block_bytes], as many as fit into the memory."""
    num_slots = len(memory) // (factor * block_bytes)
    return memory[: num_slots * factor * block_bytes].view(num_slots, factor, block_bytes)


def _both(
    store: OffloadingHandler, load: OffloadingHandler
) -> Mapping[Direction, OffloadingHandler]:
    return {(DEVICE_MEDIUM, _HOST): store, (_HOST, DEVICE_MEDIUM): load}
