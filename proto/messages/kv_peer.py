"""Messages of the PeerConnector, which hands KV from one daemon to another.

One daemon computes a prompt (the producer), another one goes on with it (the consumer). Each worker
of the consumer fetches its part from the worker of the same rank of the producer:

    consumer    Hello ─▶         Open ─▶         Fetch, Heartbeat, Release ─▶
    producer         ─▶ Welcome       ─▶ Opened                            ─▶ Blocks, Alive

Any message may be answered with a Refusal, after which the connection is closed. `PeerStep` and
`PeerReport` are between the two halves of the connector in one daemon. No time of a clock crosses:
leases are durations.
"""

from typing import Final

import msgspec

from proto.messages.kv_connector import TransferJob
from proto.messages.stats import KVCopy

PEER_VERSION: Final = 1
"""Of the messages between daemons; another version is refused by name."""
NONCE_BYTES: Final = 16
MAX_BATCH_BLOCKS: Final = 1024
"""Blocks of a Fetch."""
MAX_WATCHED: Final = 4096
"""Requests of a Heartbeat."""


class PeerLayout(msgspec.Struct, array_like=True, frozen=True):
    """What must be equal at both ends, so that bytes of one KV cache have a meaning in the other.

    rank, num_ranks: position among tensor-parallel workers. block_size: tokens of a block.
    block_bytes: of a block on this rank. windows: of the KV cache groups, 0 for full attention.
    fingerprint: digest of everything that changes KV values: model, weights, kernels.
    """

    num_ranks: int
    rank: int
    block_size: int
    dtype: str
    windows: list[int]
    block_bytes: int
    fingerprint: bytes

    def difference(self, other: "PeerLayout") -> str:
        """Name the first field in which `other` differs, with both values; "" for none."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and isinstance(mine, bytes):
                return (
                    f"{name} {theirs.hex()[:16]}, not {mine.hex()[:16]}: another model or version"
                )
            if mine != theirs:
                return f"{name} {theirs}, not {mine}"
        return ""


class Hello(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """nonce: random, NONCE_BYTES."""

    version: int
    nonce: bytes


class Welcome(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """worker_id: of the producer's worker. proof: shows that it has the key."""

    version: int
    nonce: bytes
    worker_id: str
    proof: bytes


class Open(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The first message with a code of authentication: it shows that the consumer has the key."""

    layout: PeerLayout


class Opened(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The layouts are equal."""


class Refusal(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Why the producer does not do what it was asked for."""

    reason: str


class Fetch(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """Blocks of a request by their keys: hash (of tokens, salt, adapter, images), group, ranks.

    tenant: of the consumer's request. area: half of the shared memory that gets the blocks, 0 or 1.
    """

    request_id: str
    tenant: int
    keys: list[bytes]
    area: int = 0


class Blocks(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The answer to a Fetch; by TCP the bytes of the blocks follow it.

    checksums: CRC-32 of each block; empty for blocks in shared memory.
    """

    checksums: list[int]


class Heartbeat(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """The consumer still wants the KV of these requests; their leases are extended."""

    request_ids: list[str]


class Alive(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """The answer to a Heartbeat or a Release: those of its requests that have a lease."""

    request_ids: list[str]


class Release(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """The consumer wants no more of a request. failure: why it was not loaded; "" if it was."""

    request_id: str
    failure: str = ""


ToProducer = Hello | Open | Fetch | Heartbeat | Release
ToConsumer = Welcome | Opened | Refusal | Blocks | Alive


# Between the halves of the connector in one daemon


class PeerWorkerAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where a worker is reached.

    worker_id: random, 32 hex digits; also the name of its Unix socket. port: of TCP; 0 for none.
    """

    worker_id: str
    port: int


class PeerSource(msgspec.Struct, array_like=True, frozen=True):
    """The producer of a request's KV. workers: one for each of its ranks."""

    request_id: str
    host: str
    workers: list[PeerWorkerAddress]


class PeerHold(msgspec.Struct, array_like=True, frozen=True):
    """The blocks of a finished request that a consumer may fetch: parallel lists."""

    seq_id: int
    request_id: str
    tenant: int
    keys: list[bytes]
    block_ids: list[int]


class PeerLoad(msgspec.Struct, array_like=True, frozen=True):
    """A load; its job has the request's seq_id as number."""

    source: PeerSource
    tenant: int
    job: TransferJob


class PeerStep(msgspec.Struct, array_like=True, frozen=True):
    """What changes with a step.

    holds: begin leases. drops: seq_ids whose leases end now. watches: begin heartbeats. loads: also
    end the heartbeats, when they end. releases: of a request that is not loaded, and why.
    """

    holds: list[PeerHold] = []
    drops: list[int] = []
    watches: list[PeerSource] = []
    loads: list[PeerLoad] = []
    releases: list[tuple[PeerSource, str]] = []


class PeerReport(msgspec.Struct, array_like=True, frozen=True):
    """One rank's news. loads: that have succeeded since the last report; num_failed: others.

    A report without news says that heartbeats have arrived, so the engine sees that leases live.
    """

    rank: int
    address: PeerWorkerAddress
    loads: list[KVCopy] = []
    num_failed: int = 0
