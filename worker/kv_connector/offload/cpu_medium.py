"""Offloading to host memory: a pool of slots in each worker.

    cpu_bytes_to_use    [ slot 0: factor blocks | slot 1 | … ]     for each rank its own blocks

The device makes the pool and copies (worker/host/block_copies.py, worker/cuda/block_copies.py).
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from proto.messages.kv_events import DEVICE_MEDIUM
from proto.runtime.host_resources import available_memory
from proto.settings.kv_transfer_config import config_key_error, cpu_settings
from worker.kv_connector.offload.base import Direction, HandlerContext, OffloadingHandler

_HOST: Final = "CPU"


def make_handlers(
    extra: Mapping[str, Any], context: HandlerContext
) -> Mapping[Direction, OffloadingHandler]:
    """Create the pool and both handlers; raises ConfigError if too little memory is free."""
    num_bytes = int(cpu_settings(extra).cpu_bytes_to_use * context.share)
    free = available_memory()
    if num_bytes > free:
        raise config_key_error(
            "cpu_bytes_to_use",
            f"is more than the {free} bytes of memory that are free: {num_bytes}",
        )
    store, load = context.device.block_copies(context.cache.block_rows(), num_bytes, context)
    return {(DEVICE_MEDIUM, _HOST): store, (_HOST, DEVICE_MEDIUM): load}


def pool_rows(memory: torch.Tensor, factor: int, block_bytes: int) -> torch.Tensor:
    """View memory as uint8 [num_slots, factor, block_bytes], with as many slots as fit."""
    num_slots = len(memory) // (factor * block_bytes)
    return memory[: num_slots * factor * block_bytes].view(num_slots, factor, block_bytes)
