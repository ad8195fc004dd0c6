"""Changes of the prefix cache, for routers that send a request to where its prefix is cached.

An engine publishes batches on a ZMQ PUB socket, each one frame of msgpack. A subscriber that
applies the events of all batches in order knows the (group, block hash) pairs in the engine's
prefix index and on other media.

    epoch       of the engine; a new one begins with an empty cache and sequence 0
    sequence    number of the batch in its epoch; a gap means that batches were lost, so that the
                subscriber may know blocks that were removed

PUB drops messages that a slow subscriber does not read, and keeps none for later subscribers.
"""

from typing import Final

import msgspec

DEVICE_MEDIUM: Final = "GPU"
"""Medium of the KV pool on any device; the name is that of other implementations."""


class BlockStored(msgspec.Struct, array_like=True, tag="stored", frozen=True):
    """Consecutive blocks of one sequence were added to the prefix index.

    block_hashes: [num_blocks], 32 bytes each; a hash may be stored already.
    parent_block_hash: of the block before the first one; None at the start of a prompt.
    token_ids: [num_blocks * block_size]. Other media than the KV pool report neither token ids nor
        a parent; there, a block of block_size tokens that ends where these blocks end is stored.
    group: KV cache group, from 0. medium: the KV pool, or one that a connector copies to.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    group: int = 0
    medium: str = DEVICE_MEDIUM


class BlockRemoved(msgspec.Struct, array_like=True, tag="removed", frozen=True):
    """The last block with this content was removed from a group and medium."""

    block_hash: bytes
    group: int = 0
    medium: str = DEVICE_MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag="cleared", frozen=True):
    """The prefix cache was reset: no group has cached blocks."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one step, in order. timestamp: seconds of the monotonic clock."""

    epoch: int
    sequence: int
    timestamp: float
    events: list[KVEvent]
