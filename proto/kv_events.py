"""What changes in the prefix cache, for whoever routes requests by what is cached.

An engine publishes batches on a ZMQ PUB socket, each one frame of msgpack. A
subscriber that applies the events of every batch in order knows the set of
(group, block hash) that the engine's prefix index holds, and those that other media have.

    epoch       of the engine; another one begins with an empty cache and sequence 0
    sequence    counts the batches of an epoch; a gap means that batches were lost, and
                what is known may name blocks that are gone

PUB drops what a slow or absent subscriber does not take, and keeps nothing for
later ones.
"""

from typing import Final

import msgspec

DEVICE_MEDIUM: Final = "GPU"
"""The KV pool, whatever the device is: the name by which others know it."""


class BlockStored(msgspec.Struct, array_like=True, tag="stored", frozen=True):
    """Consecutive blocks of one sequence can be found from now on.

    block_hashes: [num_blocks], 32 bytes each; a hash may be stored already.
    parent_block_hash: of the block before the first one; None at the start of a prompt.
    token_ids: [num_blocks * block_size]; of another medium than the device's nothing, and no
        parent: what ends with these blocks is on it, in pieces of block_size tokens.
    group: KV cache group, from 0. medium: where they are, the device or what a connector copies to.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    group: int = 0
    medium: str = DEVICE_MEDIUM


class BlockRemoved(msgspec.Struct, array_like=True, tag="removed", frozen=True):
    """No block of the group holds this content any more, on this medium."""

    block_hash: bytes
    group: int = 0
    medium: str = DEVICE_MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag="cleared", frozen=True):
    """The prefix cache was reset; nothing is cached in any group."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What happened in one step, in order. timestamp: monotonic seconds."""

    epoch: int
    sequence: int
    timestamp: float
    events: list[KVEvent]
