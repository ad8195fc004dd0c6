"""Hit rates of eviction policies, on a trace of agents and scans.

Reads workloads from stdin and prints their hits, one JSON line each. The manager and its policies
are those of the offloading connector; the device is a list of blocks with LRU eviction.
"""

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256

from engine_core.kv_connector.offload.base import OffloadingManager, OffloadKey, ReuseTracker
from engine_core.kv_connector.offload.cpu_manager import CPUOffloadingManager
from engine_core.kv_connector.offload.eviction import ARCPolicy, LRUPolicy
from proto.codec import from_json, to_json_line
from tests.benchmarks.messages import OffloadHits, OffloadHitsOfAll, OffloadWorkload

NO_MEDIUM = "none"
_TRACKED = 64_000


def main() -> None:
    """Run workloads until EOF."""
    for line in sys.stdin.buffer:
        workload = from_json(line, OffloadWorkload)
        rows = [play(workload, policy) for policy in workload.policies]
        sys.stdout.buffer.write(to_json_line(OffloadHitsOfAll(rows=rows)))
        sys.stdout.buffer.flush()


def play(workload: OffloadWorkload, policy: str) -> OffloadHits:
    """Run one policy over the whole trace; raise ValueError for an unknown one."""
    device = _Device(workload.device_blocks)
    manager, reuse = _manager(policy, workload.medium_blocks)
    num_blocks = num_device = num_medium = num_stored = 0
    for keys, is_scan in requests(workload):
        on_device = device.find(keys)
        manager.touch(keys)
        rest = keys[on_device:]
        if reuse is not None:
            for key in rest:
                reuse.record_lookup(key)
        on_medium = manager.lookup(rest) or 0
        manager.prepare_load(rest[:on_medium])
        manager.complete_load(rest[:on_medium])
        device.keep(keys)
        num_stored += _store(manager, keys, reuse)
        if not is_scan:
            num_blocks += len(keys)
            num_device += on_device
            num_medium += on_medium
    return OffloadHits(
        policy=policy,
        num_blocks=num_blocks,
        device=num_device / num_blocks,
        medium=num_medium / num_blocks,
        computed=1.0 - (num_device + num_medium) / num_blocks,
        num_stored=num_stored,
    )


def requests(workload: OffloadWorkload) -> Iterator[tuple[list[OffloadKey], bool]]:
    """Yield the blocks of every prompt, and whether it is a scan.

    The order of the agents is drawn again for every turn.
    """
    draw = random.Random(workload.seed)
    common = _names("common", workload.common_blocks)
    own = workload.agent_blocks - workload.common_blocks
    histories = [common + _names(f"agent {each}", own) for each in range(workload.num_agents)]
    num_scans = 0
    for turn in range(workload.num_turns):
        for agent in draw.sample(range(workload.num_agents), workload.num_agents):
            while draw.random() < workload.scan_share:
                yield _names(f"scan {num_scans}", workload.scan_blocks), True
                num_scans += 1
            histories[agent] += _names(f"agent {agent} turn {turn}", workload.turn_blocks)
            yield list(histories[agent]), False


class _Device:
    """The KV pool without running requests: block names, least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[OffloadKey, None] = OrderedDict()

    def find(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading blocks that are cached."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def keep(self, keys: Sequence[OffloadKey]) -> None:
        """Free blocks last first, like the blocks of a request."""
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


def _store(
    manager: OffloadingManager,
    keys: Sequence[OffloadKey],
    reuse: ReuseTracker | None,
    chunk: int = 16,
) -> int:
    """Store blocks like the connector, chunk by chunk; return how many were stored."""
    num_stored = 0
    for end in range(chunk, len(keys) + chunk, chunk):
        wanted = [
            key for key in keys[end - chunk : end] if reuse is None or reuse.reaches_threshold(key)
        ]
        prepared = manager.prepare_store(wanted)
        manager.touch(keys[:end], is_new_use=False)
        if prepared is not None:
            manager.complete_store(prepared.keys)
            num_stored += len(prepared.keys)
    return num_stored


def _manager(policy: str, num_slots: int) -> tuple[OffloadingManager, ReuseTracker | None]:
    name, _, threshold = policy.partition("+")
    if name not in (NO_MEDIUM, "lru", "arc"):
        raise ValueError(f"no policy {name}")
    slots = 0 if name == NO_MEDIUM else num_slots
    order = ARCPolicy(slots) if name == "arc" else LRUPolicy()
    reuse = ReuseTracker(int(threshold), _TRACKED) if threshold else None
    return CPUOffloadingManager(slots, order), reuse


def _names(what: str, count: int) -> list[OffloadKey]:
    return [sha256(f"{what} block {each}".encode()).digest() for each in range(count)]


if __name__ == "__main__":
    main()
