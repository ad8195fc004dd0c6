"""Copies between the device's KV blocks and another medium, as the engine orders them.

An offloaded block mirrors `factor` device blocks of one KV group that follow each other. The first
one of a transfer may be needed from its middle on, the last one may end early:

    offloaded     |     key 0     |     key 1     |      factor 4
    device        .  .  7   2     9  4   1   .           skip 2, blocks [7 2 9 4 1]
"""

import msgspec


class DeviceBlocks(msgspec.Struct, array_like=True, frozen=True):
    """One KV group's side of a transfer.

    group: KV cache group, from 0. block_ids: device blocks, in the order of the sequence.
    skip: device blocks of the first offloaded block that come before the first of these.
    """

    group: int
    block_ids: list[int]
    skip: int = 0


class TransferJob(msgspec.Struct, array_like=True, frozen=True):
    """One copy. Its blocks are held on both sides until it is reported as over.

    job_id: never the same twice within an epoch. medium: that is not the device.
    is_load: towards the device. device: per group that takes part.
    slots, keys: per group, parallel to `device`, the offloaded blocks: numbers of places, or keys,
        whichever the medium goes by; the other is empty.
    """

    job_id: int
    medium: str
    is_load: bool
    device: list[DeviceBlocks]
    slots: list[list[int]] = []
    keys: list[list[bytes]] = []


class OffloadMetadata(msgspec.Struct, array_like=True, frozen=True):
    """What the offloading connector has a worker do with a step.

    loads: to begin before the step. stores: to begin with the step that follows, so that
    they do not stand in the way of this one's tokens. flush: jobs that have to be over before the
    step is computed (there are too few free blocks, and these are held until then).
    load_seq_ids: of the requests that wait for them, parallel to `loads`.
    """

    loads: list[TransferJob] = []
    stores: list[TransferJob] = []
    flush: list[int] = []
    load_seq_ids: list[int] = []


class FinishedJob(msgspec.Struct, array_like=True, frozen=True):
    """A copy that is over. num_bytes, seconds: of this rank; nothing was kept where it failed.

    given_up: somebody could not wait for it, which says nothing of the medium.
    """

    job_id: int
    succeeded: bool
    num_bytes: int = 0
    seconds: float = 0.0
    given_up: bool = False


class OffloadReport(msgspec.Struct, array_like=True, frozen=True):
    """Jobs of one rank that are over since its last report."""

    finished: list[FinishedJob] = []
