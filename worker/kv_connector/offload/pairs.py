"""Which device block of a transfer belongs to which part of which offloaded block.

slots          |      9        |      4        |       factor 4
parts          | 0   1   2   3 | 0   1   2   3 |
device blocks            7   2   8   4   1             skip 2, the last one ends early
"""

from collections.abc import Iterator
from typing import NamedTuple

from proto.kv_connector import TransferJob


class Pair(NamedTuple):
    """A device block, and the part (0 to factor - 1) of the slot that mirrors it."""

    block: int
    slot: int
    part: int


def pairs_of(job: TransferJob, factor: int) -> Iterator[Pair]:
    """Group by group, in the order of the sequence."""
    for device, slots in zip(job.device, job.slots, strict=True):
        for at, block in enumerate(device.block_ids, device.skip):
            yield Pair(block, slots[at // factor], at % factor)


def device_blocks(job: TransferJob) -> list[int]:
    """All device blocks of a transfer."""
    return [block for device in job.device for block in device.block_ids]
