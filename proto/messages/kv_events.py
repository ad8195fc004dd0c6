"""Changes of the prefix cache, for routers that send a request to where its prefix is cached.

The wire is vLLM's (`vllm/distributed/kv_events.py`, 0.24 and later), which routers read. An engine
publishes batches on a ZMQ PUB socket in three frames:

    topic | sequence, 8 bytes big-endian | msgpack of KVEventBatch

A subscriber that applies the events of all batches in order knows the (group, block hash) pairs in
the engine's prefix index and on other media. A gap in the sequence means that batches were lost.
A block is named by the last 8 bytes of its hash, as an unsigned big-endian integer.

A REQ or DEALER socket that sends 8 bytes, a sequence big-endian, to the replay endpoint is answered
with the batches that are kept from it on, as (empty, topic, sequence, batch), and an end with the
sequence -1 and an empty batch.
"""

from typing import Final

import msgspec

DEVICE_MEDIUM: Final = "GPU"
"""Medium of the KV pool on any device; the name is that of other implementations."""
SEQUENCE_BYTES: Final = 8
LAST_SEQUENCE: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Ends a replay."""


def event_hash(block_hash: bytes) -> int:
    """Return the name of a block in events, below 2^64. block_hash: [32]."""
    return int.from_bytes(block_hash[-8:], "big")


class BlockStored(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Consecutive blocks of one sequence were added to the prefix index.

    block_hashes: [num_blocks]; a hash may be stored already.
    parent_block_hash: of the block before the first one; None at the start of a prompt.
    token_ids: [num_blocks * block_size]; empty, and without a parent, for a block that another
        medium has kept from an earlier engine: it ends where the block of this hash ends.
    block_size: tokens of a block on this medium.
    lora_id, lora_name: of the adapter; None for none.
    medium: the KV pool, or one that a connector copies to.
    extra_keys: for each block the values of its extra keys in order (a salt is text, a digest
        hexadecimal), None for none; None if no block has any.
    group_idx: KV cache group, from 0.
    kv_cache_spec_kind: of the group: full_attention, sliding_window, mla_attention, …; mamba for
        recurrent states of any kind, of which a block is the state at its end.
    kv_cache_spec_sliding_window: tokens that a token of the group attends to; None for all.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """The last blocks with these contents were removed from a group and medium."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """The prefix cache is empty: no group has cached blocks."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one step, in order.

    timestamp: seconds since 1970. data_parallel_rank: of the engine.
    """

    timestamp: float
    events: list[KVEvent]
    data_parallel_rank: int = 0
