"""The medium that is host memory, as far as the engine is concerned."""

from collections.abc import Mapping
from typing import Any

from engine_core.kv_connector.offload.arc import ARCPolicy
from engine_core.kv_connector.offload.base import ManagerContext, OffloadingManager
from engine_core.kv_connector.offload.ledger import CPUOffloadingManager
from engine_core.kv_connector.offload.lru import LRUPolicy
from proto.kv_transfer_config import cpu_settings, wrong


def make_manager(extra: Mapping[str, Any], context: ManagerContext) -> OffloadingManager:
    """A ledger of as many slots as the memory of all ranks holds; raises ConfigError.

    cpu_bytes_to_use   [ slot 0 | slot 1 | … ]        a slot: one block of every rank
    """
    settings = cpu_settings(extra)
    bytes_of_all = context.block_bytes * context.num_ranks
    num_slots = settings.cpu_bytes_to_use // bytes_of_all
    if num_slots < 1:
        raise wrong(
            "cpu_bytes_to_use",
            f"holds no block: {settings.cpu_bytes_to_use} bytes, and a block of "
            f"{context.num_ranks} ranks has {bytes_of_all}",
        )
    policy = ARCPolicy(num_slots) if settings.eviction_policy == "arc" else LRUPolicy()
    return CPUOffloadingManager(num_slots, policy)
