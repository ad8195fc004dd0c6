"""Manager of blocks in host memory: which offloaded blocks are in which slots.

It allocates slots and keeps block states; the eviction order is the policy's. It accesses no
memory: slots are indices into a buffer of each worker.

    state           -1 ──complete_store──▶ 0 ──prepare_load──▶ 1 ──prepare_load──▶ 2 …
    can be loaded        no                yes                 yes
    can be evicted       no                yes                 no
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine_core.kv_connector.offload.base import (
    ManagerContext,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
)
from engine_core.kv_connector.offload.eviction import (
    BEING_STORED,
    ARCPolicy,
    EvictionPolicy,
    LRUPolicy,
    OffloadedBlock,
)
from proto.settings.kv_transfer_config import config_key_error, cpu_settings


class CPUOffloadingManager(OffloadingManager):
    """OffloadingManager of host memory with `num_slots` slots.

    Unused slots are allocated first, then the most recently freed ones.
    """

    medium = "CPU"

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self._num_slots = num_slots
        self._policy = policy
        self._num_used = 0
        self._freed: list[int] = []
        self.events: list[OffloadingEvent] = []

    def lookup(self, keys: Sequence[OffloadKey]) -> int | None:
        count = 0
        for key in keys:
            block = self._policy.get(key)
            if block is None or not block.is_present:
                break
            count += 1
        return count

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        found = map(self._policy.get, keys)
        return [block is not None and block.is_present for block in found]

    def prepare_load(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        blocks = [self._block(key) for key in keys]
        assert all(block.is_present for block in blocks), "only present blocks can be loaded"
        for block in blocks:
            block.num_readers += 1
        return [block.slot for block in blocks]

    def complete_load(self, keys: Sequence[OffloadKey], *, success: bool = True) -> None:
        for key in keys:
            block = self._block(key)
            assert block.num_readers > 0, "the load was not prepared"
            block.num_readers -= 1
            block.is_bad |= not success
            if block.is_bad and block.is_idle:
                self._remove(key, block)
                self.events.append(OffloadingEvent([key], True, self.medium))

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        new = [key for key in keys if self._policy.get(key) is None]
        num_missing = len(new) - (self._num_slots - len(self._policy))
        evicted: list[OffloadKey] = []
        if num_missing > 0:
            victims = self._policy.evict(num_missing, set(keys))
            if victims is None:
                return None
            evicted = [victim.key for victim in victims]
            self._freed += [victim.block.slot for victim in victims]
            self.events.append(OffloadingEvent(evicted, True, self.medium))
        slots = [self._allocate_slot() for _ in new]
        for key, slot in zip(new, slots, strict=True):
            self._policy.insert(key, OffloadedBlock(slot))
        return PrepareStoreOutput(new, slots, evicted)

    def complete_store(
        self, keys: Sequence[OffloadKey], *, success: bool = True, cancelled: bool = False
    ) -> None:
        stored = []
        for key in keys:
            block = self._policy.get(key)
            if block is None or block.num_readers != BEING_STORED:
                continue
            if success and not block.is_bad:
                block.num_readers = 0
                stored.append(key)
            else:
                self._remove(key, block)
        if stored:
            self.events.append(OffloadingEvent(stored, False, self.medium))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove corrupt blocks; slots in use by copies are freed when these have finished."""
        for key in keys:
            block = self._policy.get(key)
            if block is None:
                continue
            block.is_bad = True
            if block.is_idle:
                self._remove(key, block)
                self.events.append(OffloadingEvent([key], True, self.medium))

    def touch(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> None:
        self._policy.touch(keys, is_new_use)

    @property
    def num_blocks(self) -> int:
        return self._num_slots

    @property
    def num_used(self) -> int:
        return len(self._policy)

    def reset_cache(self) -> bool:
        if not all(self._block(key).is_idle for key in self._policy):
            return False
        self.on_worker_restart()
        return True

    def on_worker_restart(self) -> None:
        """Remove all blocks: the memory belonged to the workers that are gone."""
        present = [key for key in self._policy if self._block(key).num_readers >= 0]
        if present:
            self.events.append(OffloadingEvent(present, True, self.medium))
        self._policy.clear()
        self._num_used = 0
        self._freed.clear()

    def _block(self, key: OffloadKey) -> OffloadedBlock:
        block = self._policy.get(key)
        assert block is not None, f"block {key.hex()} is not present"
        return block

    def _allocate_slot(self) -> int:
        if self._num_used == self._num_slots:
            return self._freed.pop()
        self._num_used += 1
        return self._num_used - 1

    def _remove(self, key: OffloadKey, block: OffloadedBlock) -> None:
        self._policy.remove(key)
        self._freed.append(block.slot)


def make_manager(extra: Mapping[str, Any], context: ManagerContext) -> OffloadingManager:
    """Create the manager, with as many slots as fit into its share; raises ConfigError.

    cpu_bytes_to_use   [ slot 0 | slot 1 | … ]        a slot: one offloaded block of every rank
    """
    settings = cpu_settings(extra)
    slot_bytes = context.block_bytes * context.num_ranks
    num_bytes = int(settings.cpu_bytes_to_use * context.share)
    num_slots = num_bytes // slot_bytes
    if num_slots < 1:
        what = "state" if context.holds_states else "block"
        raise config_key_error(
            "cpu_bytes_to_use",
            f"holds no {what}: {num_bytes} bytes, and a {what} of {context.num_ranks} ranks has "
            f"{slot_bytes}",
        )
    policy = ARCPolicy(num_slots) if settings.eviction_policy == "arc" else LRUPolicy()
    return CPUOffloadingManager(num_slots, policy)
