"""Messages between the two halves of a KV connector: the scheduler's and each worker's.

`KVConnectorOutput` and `KVConnectorReport` are read by the scheduler and the worker loop. All other
messages belong to one connector: they travel as a `Payload`, encoded by one half and decoded by the
other (`pack`, `unpack`).
"""

from typing import Final, Literal, TypeVar

import msgspec

from proto.codec import encode
from proto.errors import ProtocolError

LoadFailurePolicy = Literal["recompute", "fail"]
T = TypeVar("T")

Payload = bytes
"""An encoded message of one connector.

Bytes and not msgspec.Raw, so that decoding the enclosing message does not look into it.
"""

NO_PAYLOAD: Final[Payload] = b""
"""The connector has no message for the other half."""


def pack(message: msgspec.Struct) -> Payload:
    return encode(message)


def unpack(payload: Payload, message_type: type[T]) -> T:
    """Decode a payload; raises ProtocolError if it is not a `message_type`."""
    try:
        return msgspec.msgpack.decode(payload, type=message_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a payload that is no {message_type.__name__}: {error}") from None


class KVConnectorOutput(msgspec.Struct, array_like=True, frozen=True):
    """Transfers that one worker's connector has finished since its last report.

    finished_sending: finished requests whose blocks the connector has stopped reading.
    finished_recving: requests whose loads have ended, successfully or not.
    invalid_block_ids: device blocks that a failed load has left without valid KV.
    worker_metadata: message of this rank for the scheduler's half.
    invalid_state_slots: slots that a failed load has left without a valid recurrent state.
    """

    finished_sending: list[int] = []
    finished_recving: list[int] = []
    invalid_block_ids: list[int] = []
    worker_metadata: Payload = NO_PAYLOAD
    invalid_state_slots: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.invalid_block_ids
            or self.invalid_state_slots
            or self.worker_metadata
        )


class KVConnectorReport(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Finished transfers of one rank, sent before the result of the step in which they finished.

    Between two steps it is sent on its own, which wakes an engine that waits for a load.
    """

    epoch: int
    rank: int
    output: KVConnectorOutput


# OffloadingConnector
#
# An offloaded block mirrors `factor` consecutive device blocks of one KV cache group. A transfer
# may begin in the middle of its first offloaded block and end in the middle of its last one:
#
#     offloaded     |     key 0     |     key 1     |      factor 4
#     device        .  .  7   2     9  4   1   .           skip 2, blocks [7 2 9 4 1]


class DeviceBlocks(msgspec.Struct, array_like=True, frozen=True):
    """Device blocks of one KV cache group in a transfer.

    group: index of the KV cache group. block_ids: in the order of the sequence.
    skip: device blocks of the first offloaded block that precede block_ids[0].
    Of the group of recurrent states these are slots, each of which is a page of the medium.
    """

    group: int
    block_ids: list[int]
    skip: int = 0


class TransferJob(msgspec.Struct, array_like=True, frozen=True):
    """One copy between the device and a medium. Its blocks stay allocated until it has finished.

    job_id: unique within an epoch. medium: name of the medium. is_load: copies to the device.
    device: one entry for each KV cache group that takes part.
    slots, keys: offloaded blocks of each entry of `device`. A medium is addressed by slot numbers
        or by keys; the other list is empty.
    is_of_states: copies recurrent states, else KV; never both.
    """

    job_id: int
    medium: str
    is_load: bool
    device: list[DeviceBlocks]
    slots: list[list[int]] = []
    keys: list[list[bytes]] = []
    is_of_states: bool = False


class OffloadMetadata(msgspec.Struct, array_like=True, frozen=True):
    """Copies that a worker has to start or to wait for in a step.

    loads: start before the step. stores: start with the following step, so that they do not
    compete with this one. flush: jobs that must finish before the step is computed, because it
    overwrites their blocks. load_seq_ids: sequence ids that wait for `loads`, parallel to it; one
    that waits for KV and for a state is there twice.
    """

    loads: list[TransferJob] = []
    stores: list[TransferJob] = []
    flush: list[int] = []
    load_seq_ids: list[int] = []


class FinishedJob(msgspec.Struct, array_like=True, frozen=True):
    """Result of a copy on one rank. num_bytes, seconds: of this rank.

    cancelled: the copy was cancelled to free its blocks; the medium itself has not failed.
    """

    job_id: int
    succeeded: bool
    num_bytes: int = 0
    seconds: float = 0.0
    cancelled: bool = False


class OffloadReport(msgspec.Struct, array_like=True, frozen=True):
    """Copies that one rank has finished since its last report."""

    finished: list[FinishedJob] = []


# SharedStorageConnector


class SharedStorageStep(msgspec.Struct, array_like=True, frozen=True):
    """Files to read before a step and to write after it, as parallel lists.

    *_hashes: block hashes, which name the files. *_blocks: device blocks.
    """

    load_hashes: list[bytes] = []
    load_blocks: list[int] = []
    store_hashes: list[bytes] = []
    store_blocks: list[int] = []


class SharedStorageReport(msgspec.Struct, array_like=True, frozen=True):
    """Block hashes that this rank has written (stored), or failed to read or write (lost)."""

    stored: list[bytes] = []
    lost: list[bytes] = []


# MultiConnector


class MultiStep(msgspec.Struct, array_like=True, frozen=True):
    """Messages of the child connectors for one step, in the order of the children."""

    parts: list[bytes]


class MultiReport(msgspec.Struct, array_like=True, frozen=True):
    """Messages of one rank's child connectors, in the order of the children.

    sending: sequence ids of finished requests whose blocks each child has stopped reading.
    """

    parts: list[bytes]
    sending: list[list[int]]
