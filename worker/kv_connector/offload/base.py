"""Interface between the workers' half of the offloading connector and a medium.

A medium provides one `OffloadingHandler` for each direction; `create_handlers` selects them by spec
name. See engine_core/kv_connector/offload/base.py for media from outside.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch

from proto.messages.kv_connector import TransferJob
from proto.runtime.plugins import medium_part
from proto.settings.kv_media import STATES, media_folder
from proto.settings.kv_transfer_config import (
    CPU_SPEC,
    DISK_SPEC,
    FIELD,
    REMOTE_SPEC,
    OffloadSettings,
)
from worker.kv_connector.offload.block_image import BlockBytes

_HERE: Final = "worker.kv_connector.offload"
HANDLERS: Final = {
    CPU_SPEC: f"{_HERE}.cpu_medium:make_handlers",
    DISK_SPEC: f"{_HERE}.disk_medium:make_handlers",
    REMOTE_SPEC: f"{_HERE}.remote_medium:make_handlers",
}
STORE_NICENESS: Final = 10
"""Niceness of threads that store; no request waits for a store."""
Direction = tuple[str, str]
"""(source, target): names of media."""


class BlockDevice(ABC):
    """Copies blocks of a KV cache between a device and the host; a `Device` is one."""

    @abstractmethod
    def block_bytes(self, rows: torch.Tensor) -> BlockBytes:
        """Return a copier of blocks, uint8 [num_blocks, block_bytes], for one thread."""

    @abstractmethod
    def block_copies(
        self, blocks: torch.Tensor, num_bytes: int, context: "HandlerContext"
    ) -> "tuple[OffloadingHandler, OffloadingHandler]":
        """Return what stores blocks in a new pool of host memory, and what loads them from it."""


class BlockRows(Protocol):
    """What a medium copies: a KVCache, or a StateCache, whose blocks are its slots."""

    def block_rows(self) -> torch.Tensor:
        """View it as uint8 [num_blocks, block_bytes]."""


@dataclass(frozen=True)
class HandlerContext:
    """Facts about the worker that a medium needs.

    factor: device blocks of an offloaded block. device: where the cache is. fingerprint: digest of
    everything that changes KV values. notify: call it, from any thread, when a copy has finished.
    holds_states, share: as in the engine's ManagerContext.
    """

    cache: BlockRows
    device: BlockDevice
    factor: int
    rank: int
    num_ranks: int
    fingerprint: bytes
    notify: Callable[[], None]
    holds_states: bool = False
    share: float = 1.0

    @property
    def folder(self) -> str:
        """Name of the folder of these blocks, see `kv_media.media_folder`."""
        factor = STATES if self.holds_states else self.factor
        return media_folder(self.fingerprint, self.num_ranks, factor)


class TransferResult(NamedTuple):
    """Result of a copy on this rank.

    failed_blocks: device blocks that a load has left invalid. cancelled: see FinishedJob.
    """

    job_id: int
    succeeded: bool
    num_bytes: int
    seconds: float
    failed_blocks: list[int]
    cancelled: bool = False


class OffloadingHandler(Protocol):
    """Makes the copies of one direction, in the order given."""

    def transfer_async(self, job: TransferJob) -> None:
        """Start a copy; never blocks, and never raises for an error of the medium."""

    def get_finished(self) -> list[TransferResult]:
        """Return copies finished since the last call; never blocks."""

    def wait(self, job_ids: set[int]) -> None:
        """Block until the given jobs of this handler have finished."""

    def close(self) -> None:
        """Block until no copy accesses the device's memory any more."""


def create_handlers(
    settings: OffloadSettings, extra: Mapping[str, Any], context: HandlerContext
) -> Mapping[Direction, OffloadingHandler]:
    """Create the handlers of the configured medium, for both directions; raises ConfigError."""
    name, module = settings.spec_name, settings.spec_module_path
    make = medium_part(name, module, HANDLERS, "handlers", FIELD)
    handlers: Mapping[Direction, OffloadingHandler] = make(extra, context)
    return handlers


class BlockPair(NamedTuple):
    """A device block and the part (0 to factor - 1) of the slot that mirrors it."""

    block: int
    slot: int
    part: int


def block_pairs(job: TransferJob, factor: int) -> Iterator[BlockPair]:
    """Yield the device blocks of a job with their slots, group by group, in sequence order.

    slots          |      9        |      4        |       factor 4
    parts          | 0   1   2   3 | 0   1   2   3 |
    device blocks            7   2   8   4   1             skip 2, the last slot is partly used
    """
    for device, slots in zip(job.device, job.slots, strict=True):
        for index, block in enumerate(device.block_ids, device.skip):
            yield BlockPair(block, slots[index // factor], index % factor)


def device_blocks(job: TransferJob) -> list[int]:
    return [block for device in job.device for block in device.block_ids]
