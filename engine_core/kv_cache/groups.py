"""KV cache groups: layers that share one block table per sequence.

A group owns the block tables of its sequences and decides which blocks a number of tokens needs.
The registry `GROUP_KINDS` is at the end of the file.

    FullAttentionGroup    every token sees all earlier ones: a table keeps all its blocks
    SlidingWindowGroup    a token sees a window: blocks before it are freed
    UncachedGroup         an encoder's: it has no blocks
    RecurrentStateGroup   states of layers without attention: slots of a pool of their own

All but the last take their blocks from one pool. To add state that is not KV, extend `CacheGroup`
and add a line to `GROUP_KINDS`; workers name the kind in `proto.messages.lifecycle.KVGroup.kind`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Final

from engine_core.block_hashing import GroupKeys, split_key
from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_cache.pool import BlockPool, TransferRefs
from engine_core.request import Request
from proto.messages.lifecycle import NOT_CACHED, RECURRENT_STATE, slots_per_sequence
from proto.messages.lifecycle import KVGroup as KVGroupSpec

FULL_ATTENTION: Final = "full_attention"
SLIDING_WINDOW: Final = "sliding_window"
_NEVER: Final = 1 << 62
"""More tokens than any sequence has."""


class _Sequence:
    """A group's record of one sequence.

    blocks: its block table. num_cached: leading blocks that were given to the prefix index.
    num_skipped: leading entries that are null, because no later token needs the blocks.
    """

    __slots__ = ("blocks", "num_cached", "num_skipped")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_cached = 0
        self.num_skipped = 0


class CacheGroup(ABC):
    """A group as the coordinator and the manager use it; its blocks need not hold K and V.

    block_size: tokens that one entry of a block table stands for.
    pool: the pool from which it takes its blocks.
    num_dropped: cached blocks at the end of a hit that are computed again (`KVCacheManager`).
    caches_all_prefixes: if a prefix is cached, every shorter prefix that ends with a block is too.
    """

    caches_all_prefixes = True

    def __init__(
        self, pool: BlockPool, keys: GroupKeys, spec: KVGroupSpec, num_dropped: int = 0
    ) -> None:
        self.block_size = keys.block_size
        self.pool = pool
        self._num_dropped = num_dropped
        self._keys = keys
        self._sequences: dict[int, _Sequence] = {}

    @staticmethod
    @abstractmethod
    def max_blocks(
        spec: KVGroupSpec, num_tokens: int, block_size: int, longest_chunk: int | None
    ) -> int:
        """Return the most blocks that a sequence holds at once while its tokens are computed.

        longest_chunk: maximum tokens of a sequence in one step; None: all of them.
        """

    @abstractmethod
    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        """Return the block table of the longest cached prefix of at most `max_tokens` tokens.

        Null blocks stand for blocks that no later token needs. The `num_dropped` blocks after it
        are cached, too, so that the token after the prefix is the same.
        """

    @abstractmethod
    def find_fork(self, seq_id: int, num_tokens: int) -> tuple[list[int], int] | None:
        """Return what a fork of the first `num_tokens` tokens of a sequence shares and copies.

        The shared blocks, and the block in which the tokens end, to be copied: the null block if
        they end with a block. None if the sequence has freed a block that the fork needs.
        """

    @abstractmethod
    def remove_skipped_blocks(self, seq_id: int, num_computed: int) -> None:
        """Free the blocks that tokens from position `num_computed` on do not need."""

    @abstractmethod
    def num_new_blocks(
        self, seq_id: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        """Return how many blocks `allocate_blocks` would take from the pool; changes nothing.

        num_hits: table entries that `attach_blocks` will start with, for a sequence without table.
        num_computed: the position given to `remove_skipped_blocks` in between; 0: it is not called.
        """

    @abstractmethod
    def attach_blocks(self, seq_id: int, hits: Sequence[int]) -> None:
        """Start the block table of a sequence with cached blocks, and reference them."""

    @abstractmethod
    def allocate_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        """Append new blocks until the table has room for `num_tokens`; return the new ones."""

    @abstractmethod
    def cache_full_blocks(self, seq_id: int, content: Request, num_tokens: int) -> int:
        """Make the blocks that the first `num_tokens` tokens fill findable, if caching is enabled.

        Returns how many tokens, lookahead included, the sequence must have before another call of
        remove_skipped_blocks, allocate_blocks or cache_full_blocks changes anything.
        """

    def uncache_after(self, seq_id: int, num_tokens: int) -> None:
        """Remove the blocks after the first `num_tokens` tokens from the prefix index.

        The block table keeps them, and they do not become findable again.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            num_kept = num_tokens // self.block_size
            self.pool.uncache(sequence.blocks[num_kept : sequence.num_cached])

    def uncache_hashes(self, block_hashes: Sequence[bytes]) -> None:
        """Remove every block with one of these hashes from the prefix index."""
        for block_hash in block_hashes:
            self.pool.uncache_key(self._keys.key(block_hash))

    def rename_sequence(self, seq_id: int, new_seq_id: int) -> None:
        """Give the block table of a sequence to another seq_id."""
        assert new_seq_id not in self._sequences, f"sequence {new_seq_id} has a table already"
        self._sequences[new_seq_id] = self._sequences.pop(seq_id)

    @abstractmethod
    def free_sequence(self, seq_id: int) -> None:
        """Free the blocks of a sequence, last one first; nothing if it has none."""

    @abstractmethod
    def num_valid_tokens(self, seq_id: int, bad_blocks: Collection[int]) -> int | None:
        """Return how many leading tokens of a sequence have no bad block; None: all of them.

        The manager asks only if `caches_all_prefixes` holds for all groups.
        """

    @abstractmethod
    def prefix_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        """Return the blocks of the first `num_tokens` tokens of a sequence, whole blocks only."""

    @abstractmethod
    def cached_blocks(self, seq_id: int, first_token: int) -> list[tuple[int, int]]:
        """Return (position, block) of the findable blocks from the one with `first_token` on."""

    def block_table(self, seq_id: int) -> list[int]:
        """Return a copy of the block table of a sequence, [num_blocks]; empty if it has none."""
        sequence = self._sequences.get(seq_id)
        return [] if sequence is None else sequence.blocks.copy()

    def block_tables(self) -> dict[int, list[int]]:
        """Return all block tables by seq_id, not copied; the caller must not change them."""
        return {seq_id: sequence.blocks for seq_id, sequence in self._sequences.items()}

    @abstractmethod
    def violations(self, seq_id: int, unchanged_below: int) -> list[str]:
        """Return what is wrong with a block table by the group's own rules, one sentence each.

        unchanged_below: the number of tokens up to which the manager does not ask this group.
        """


class FullAttentionGroup(CacheGroup):
    """Block tables of layers that attend to every earlier position.

    block table   | 7 | 3 | 9 | 12 |
    tokens        [0, bs) [bs, 2bs) …
    """

    @staticmethod
    def max_blocks(
        spec: KVGroupSpec, num_tokens: int, block_size: int, longest_chunk: int | None
    ) -> int:
        return -(-num_tokens // block_size)

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        num_blocks = max_tokens // self.block_size + self._num_dropped
        hits = self.pool.index.longest_prefix(self._keys.leading(block_hashes, num_blocks))
        return hits[: max(0, len(hits) - self._num_dropped)] if self._num_dropped else hits

    def find_fork(self, seq_id: int, num_tokens: int) -> tuple[list[int], int] | None:
        blocks, num_full = self._sequences[seq_id].blocks, num_tokens // self.block_size
        num_blocks = -(-num_tokens // self.block_size)
        return blocks[:num_full], blocks[num_full] if num_full < num_blocks else NULL_BLOCK

    def remove_skipped_blocks(self, seq_id: int, num_computed: int) -> None:
        """Do nothing: later tokens need all blocks."""

    def num_new_blocks(
        self, seq_id: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        sequence = self._sequences.get(seq_id)
        num_held = num_hits if sequence is None else len(sequence.blocks)
        num_new = -(-num_tokens // self.block_size) - num_held
        return num_new if num_new > 0 else 0

    def attach_blocks(self, seq_id: int, hits: Sequence[int]) -> None:
        assert seq_id not in self._sequences, f"sequence {seq_id} has a table already"
        sequence = self._sequences[seq_id] = _Sequence()
        if hits:
            self.pool.touch(hits)
            sequence.blocks.extend(hits)
            sequence.num_cached = len(hits)

    def allocate_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        blocks = self._sequences[seq_id].blocks
        num_new = -(-num_tokens // self.block_size) - len(blocks)
        if num_new <= 0:
            return []
        new_blocks = self.pool.get_new_blocks(num_new)
        blocks.extend(new_blocks)
        return new_blocks

    def cache_full_blocks(self, seq_id: int, content: Request, num_tokens: int) -> int:
        sequence = self._sequences[seq_id]
        block_size = self.block_size
        room_ends = len(sequence.blocks) * block_size + 1
        if not self.pool.enable_caching:
            return room_ends
        num_full = num_tokens // block_size
        if num_full > sequence.num_cached:
            first = max(sequence.num_cached, sequence.num_skipped)
            self.pool.cache_full_blocks(sequence.blocks, first, num_full, self._keys, content)
            sequence.num_cached = num_full
        next_fills = (sequence.num_cached + 1) * block_size
        return room_ends if room_ends < next_fills else next_fills

    def free_sequence(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self.pool.free_blocks(sequence.blocks[::-1])

    def num_valid_tokens(self, seq_id: int, bad_blocks: Collection[int]) -> int | None:
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            for index, block in enumerate(sequence.blocks):
                if block in bad_blocks:
                    return index * self.block_size
        return None

    def prefix_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        sequence = self._sequences.get(seq_id)
        return [] if sequence is None else sequence.blocks[: num_tokens // self.block_size]

    def cached_blocks(self, seq_id: int, first_token: int) -> list[tuple[int, int]]:
        hashes, size = self.pool.hashes, self.block_size
        blocks, first = self._sequences[seq_id].blocks, first_token // size
        return [
            (index * size, blocks[index])
            for index in range(first, len(blocks))
            if hashes[blocks[index]] is not None
        ]

    def violations(self, seq_id: int, unchanged_below: int) -> list[str]:
        found = []
        sequence = self._sequences[seq_id]
        blocks, num_skipped = sequence.blocks, sequence.num_skipped
        if NULL_BLOCK in blocks[num_skipped:]:
            found.append(f"null block: it stands in the table of sequence {seq_id}")
        if any(blocks[:num_skipped]) or num_skipped > len(blocks):
            found.append(
                f"skipped blocks: sequence {seq_id} counts {num_skipped}, not all of them null"
            )
        # An uncached block has no hash although its sequence counts it.
        early = [block for block in blocks[sequence.num_cached :] if self._key_on(block)]
        if early or sequence.num_cached > len(blocks):
            found.append(
                f"cached count: sequence {seq_id} counts {sequence.num_cached} cached blocks "
                f"of {len(blocks)}, but of the others {len(early)} have a hash"
            )
        found += [
            f"group: block {block} of sequence {seq_id} is in group {self._keys.number} "
            f"but cached for group {split_key(key)[1]}"
            for block in blocks
            if (key := self._key_on(block)) and split_key(key)[1] != self._keys.number
        ]
        room = len(blocks) * self.block_size
        if unchanged_below > room + 1:
            found.append(
                f"room: sequence {seq_id} has blocks for {room} tokens in group "
                f"{self._keys.number}, but is not checked before {unchanged_below} are needed"
            )
        return found

    def _key_on(self, block: int) -> bytes | None:
        """Return the key of a block; None if it has none or is no block of the pool."""
        hashes = self.pool.hashes
        return hashes[block] if 0 <= block < len(hashes) else None


class SlidingWindowGroup(FullAttentionGroup):
    """Block tables of layers that attend to a window; blocks before the window are freed.

    token p attends to          [p - window + 1, p]
    computed, next position n   no later token needs tokens before n - window + 1

    block table   | 0 | 0 | 9 | 12 | 4 |      0: the null block, in place of a skipped block
                          ^ num_skipped = 2
    """

    caches_all_prefixes = False

    def __init__(
        self, pool: BlockPool, keys: GroupKeys, spec: KVGroupSpec, num_dropped: int = 0
    ) -> None:
        window = spec.sliding_window or 0
        assert window >= 1, f"a token sees at least itself, got a window of {window}"
        super().__init__(pool, keys, spec, num_dropped)
        self._window = window
        # A window of one token needs no block, but a hit needs at least one computed block.
        self._num_seen_blocks = max(1, -(-(window - 1) // keys.block_size))

    @staticmethod
    def max_blocks(
        spec: KVGroupSpec, num_tokens: int, block_size: int, longest_chunk: int | None
    ) -> int:
        """The blocks that the first token of a step sees, and those that the step computes.

        They are most where the first of these tokens ends a block:

                |<- window - 1 ->|<- chunk ->|
          | . . . . | . . . . | . . . . | . . . . |
        """
        assert spec.sliding_window is not None
        chunk = num_tokens if longest_chunk is None else min(longest_chunk, num_tokens)
        num_near = spec.sliding_window - 1 + chunk
        return min(-(-num_tokens // block_size), 1 + -(-(num_near - 1) // block_size))

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        """Search from the end: the first token after a hit needs the last window - 1 tokens.

            found          no  no  yes no  yes yes no        with two blocks in a window
            hit            |0 | 0 | 0 | 0 | 5 | 6 |

        Near the start of the sequence fewer blocks are enough, if they are all before that token.
        """
        num_dropped = self._num_dropped
        num_needed = self._num_seen_blocks + num_dropped
        first = self.pool.index.get
        end = min(max_tokens // self.block_size + num_dropped, len(block_hashes))
        run: list[int] = []
        for index in range(end - 1, -1, -1):
            block = first(self._keys.key(block_hashes[index]))
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) == num_needed:
                return [NULL_BLOCK] * index + run[num_dropped:][::-1]
        return run[num_dropped:][::-1]

    def find_fork(self, seq_id: int, num_tokens: int) -> tuple[list[int], int] | None:
        """As for full attention, with null blocks for what is outside of the window.

        sequence   |0 | 0 | 9 | 12 | 4 |
        fork       |0 | 0 | 0 | 12 |          ends in block 12 and sees nothing of block 9
        """
        found = super().find_fork(seq_id, num_tokens)
        if found is None:
            return None
        blocks, tail = found
        num_skipped = max(0, num_tokens - self._window + 1) // self.block_size
        ends_in_block = num_tokens % self.block_size > 0
        if NULL_BLOCK in blocks[num_skipped:] or (ends_in_block and tail == NULL_BLOCK):
            return None
        blocks[:num_skipped] = [NULL_BLOCK] * min(num_skipped, len(blocks))
        return blocks, tail

    def attach_blocks(self, seq_id: int, hits: Sequence[int]) -> None:
        super().attach_blocks(seq_id, hits)
        self._sequences[seq_id].num_skipped = sum(1 for block in hits if block == NULL_BLOCK)

    def num_new_blocks(
        self, seq_id: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        sequence = self._sequences.get(seq_id)
        num_held = num_hits if sequence is None else len(sequence.blocks)
        num_skipped = (num_computed - self._window + 1) // self.block_size
        num_new = -(-num_tokens // self.block_size) - max(num_held, num_skipped)
        return num_new if num_new > 0 else 0

    def remove_skipped_blocks(self, seq_id: int, num_computed: int) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return
        start, end = sequence.num_skipped, (num_computed - self._window + 1) // self.block_size
        if end <= start:
            return
        blocks = sequence.blocks
        blocks += [NULL_BLOCK] * (end - len(blocks))  # loaded KV may begin after the table's end
        self.pool.free_blocks(blocks[start:end][::-1])
        blocks[start:end] = [NULL_BLOCK] * (end - start)
        sequence.num_skipped = end

    def cache_full_blocks(self, seq_id: int, content: Request, num_tokens: int) -> int:
        """As for full attention, but also ends where the window leaves one more block behind."""
        unchanged_below = super().cache_full_blocks(seq_id, content, num_tokens)
        skips = (self._sequences[seq_id].num_skipped + 1) * self.block_size + self._window
        return unchanged_below if unchanged_below < skips else skips

    def free_sequence(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self.pool.free_blocks(sequence.blocks[sequence.num_skipped :][::-1])


class UncachedGroup(FullAttentionGroup):
    """Empty block tables: an encoder computes a sequence in one step and keeps nothing of it."""

    @staticmethod
    def max_blocks(
        spec: KVGroupSpec, num_tokens: int, block_size: int, longest_chunk: int | None
    ) -> int:
        return 0

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        return []

    def find_fork(self, seq_id: int, num_tokens: int) -> None:
        """Return None: nothing of a sequence can be shared."""

    def num_new_blocks(
        self, seq_id: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        return 0

    def allocate_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        return []

    def cache_full_blocks(self, seq_id: int, content: Request, num_tokens: int) -> int:
        return _NEVER

    def violations(self, seq_id: int, unchanged_below: int) -> list[str]:
        blocks = self._sequences[seq_id].blocks
        return [f"uncached: sequence {seq_id} has {len(blocks)} blocks"] if blocks else []


class _StateSequence(_Sequence):
    """A state group's record of one sequence.

    found: index of the entry that the sequence began with, from the cache; -1 when it has been
        freed, or for none.
    num_own: number of slots that it holds, without that one.
    wanted: indices of entries that get a slot when their block is computed, if one is free.
    kept: indices of entries that stay in the prefix index when they are freed.
    is_begun: whether the ends of the prompt have been added to `kept`.
    receives: the next entry gets a slot, into which the state is copied or loaded that the sequence
        begins with.
    """

    __slots__ = ("found", "is_begun", "kept", "num_own", "receives", "wanted")

    def __init__(self) -> None:
        super().__init__()
        self.found = -1
        self.is_begun = False
        self.kept: set[int] = set()
        self.num_own = 0
        self.receives = False
        self.wanted: set[int] = set()


class RecurrentStateGroup(CacheGroup):
    """Slots with the states of layers that keep one state of a sequence instead of its KV.

    Entry i of a block table is the slot with the state after the last computed token of block i;
    null if it is in none. A step that computes the tokens [first, end) begins with the state of
    the block of token first - 1, and writes the states of all blocks of its tokens with a slot:

        computed   | . . . . | . . . . | . . . . | . .          next position 14, blocks of 4
        table      |    0    |    0    |    9    |  4 |
                                         ^ kept at the last end of a block: what a next turn finds

    A sequence that runs may always have `slots_per_sequence` slots: the current state and the one
    at the last end of a block.
    States at other ends of blocks are kept as long as there are slots for them: of the last block
    before a chunk's last token, from which the same prompt goes on when it comes again, and states
    that other requests will look for (`want_state`). A freed state stays in the prefix index
    if a prompt ended there or another request wants it; others are removed from it and overwritten
    first.

    The sequences of a step are computed in any order, so a hit needs a state of an earlier step:
    `begin_step` makes the states of the last step findable.

    transfer_refs: references of the copies of a KV connector, each of which takes a slot more.
    num_charged: slots reserved: for each sequence the larger of `slots_per_sequence` and what it
        holds, and one more while it holds a cached state that it began with.
    """

    caches_all_prefixes = False

    def __init__(
        self, pool: BlockPool, keys: GroupKeys, spec: KVGroupSpec, num_dropped: int = 0
    ) -> None:
        assert num_dropped == 0, "a model with states has no draft head"
        super().__init__(pool, keys, spec)
        self._per_sequence = slots_per_sequence(pool.enable_caching)
        self._num_usable = pool.num_blocks - 1
        self._fresh: set[int] = set()
        # By seq_id: first new entry of the step in planning, and what its message has of them.
        self._planned: dict[int, tuple[int, list[int]]] = {}
        self.transfer_refs = TransferRefs(pool)
        self.num_charged = 0

    @staticmethod
    def max_blocks(
        spec: KVGroupSpec, num_tokens: int, block_size: int, longest_chunk: int | None
    ) -> int:
        """Return 0: its slots are not blocks of the KV pool."""
        return 0

    def begin_step(self) -> None:
        """Let the states that the steps so far compute be found."""
        self._fresh.clear()
        self._planned.clear()

    def can_start(self, hits: Sequence[int], num_loaded: int = 0) -> bool:
        """Return whether there are slots for one more sequence.

        hits: what it would start with. num_loaded: states that are loaded for it.
        """
        return self._per_sequence + bool(hits) + num_loaded <= self._num_spare

    def can_copy(self, seq_id: int, *, ends: bool) -> bool:
        """Return whether a state of a sequence may be referenced by a copy.

        ends: the sequence is about to be freed.
        """
        sequence = self._record(seq_id) if ends else None
        num_released = 0 if sequence is None else self._charge_of(sequence)
        return self._num_spare + num_released > 0

    def storable_states(self, seq_id: int, num_tokens: int, *, ends: bool) -> list[tuple[int, int]]:
        """Return (index of the block, slot) of the states of a sequence that are worth storing.

        num_tokens: computed. ends: the sequence has ended, and the last state is one of them.
        """
        sequence = self._record(seq_id)
        if sequence is None:
            return []
        blocks, num_full = sequence.blocks, num_tokens // self.block_size
        indices = range(sequence.num_skipped, num_full) if ends else sorted(sequence.kept)
        return [
            (index, blocks[index])
            for index in indices
            if 0 <= index < min(num_full, len(blocks)) and blocks[index] != NULL_BLOCK
        ]

    def receive_state(self, seq_id: int, num_tokens: int, *, is_loaded: bool) -> None:
        """Begin a new sequence with the state after these tokens, which is copied or loaded.

        `allocate_blocks` gives it a slot. A loaded one stays in the prefix index.
        """
        sequence = self._record(seq_id)
        assert sequence is not None
        assert not sequence.blocks, "the sequence has begun already"
        index = (num_tokens - 1) // self.block_size
        sequence.blocks += [NULL_BLOCK] * index
        sequence.num_skipped = index
        sequence.receives = True
        if is_loaded:
            sequence.kept.add(index)

    def want_state(self, seq_id: int, num_tokens: int, content: Request | None = None) -> bool:
        """Keep the state after these tokens, whole blocks, when it is computed.

        content: of the sequence; None before its first step is planned.
        Returns whether it is in a slot, or will be unless other sequences take the last slots
        before.
        A state that the step in planning passes gets a slot now, if one is free; the state of an
        earlier step that had none is lost.
        """
        sequence = self._record(seq_id)
        index = num_tokens // self.block_size - 1
        if sequence is None or not self.pool.enable_caching or index < sequence.num_skipped:
            return False
        sequence.wanted.add(index)
        sequence.kept.add(index)
        blocks = sequence.blocks
        if index >= len(blocks):
            return self._num_spare > 0
        if blocks[index] != NULL_BLOCK:
            return True
        first, new = self._planned.get(seq_id, (len(blocks), []))
        if content is None or index < first or not self._has_slot(sequence):
            return False
        blocks[index] = new[index - first] = self._take_slot(sequence)
        if index < sequence.num_cached:
            self.pool.cache_full_blocks(blocks, index, index + 1, self._keys, content)
            self._fresh.add(blocks[index])
        return True

    def find_state(self, block_hash: bytes) -> int | None:
        """Return the slot with the state at the end of this block; None if no hit may end there."""
        slot = self.pool.index.get(self._keys.key(block_hash))
        return None if slot in self._fresh else slot

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        """Search from the end: one state is enough, and it is in the last entry."""
        end = min(max_tokens // self.block_size, len(block_hashes))
        for index in range(end - 1, -1, -1):
            slot = self.find_state(block_hashes[index])
            if slot is not None:
                return [*[NULL_BLOCK] * index, slot]
        return []

    def find_fork(self, seq_id: int, num_tokens: int) -> tuple[list[int], int] | None:
        """Return the current state, to be copied; the manager asks for all computed tokens only.

        The table may have entries for the next ones already.
        """
        blocks = self._sequences[seq_id].blocks
        index = (num_tokens - 1) // self.block_size if self.pool.enable_caching else -1
        return [], blocks[index]

    def remove_skipped_blocks(self, seq_id: int, num_computed: int) -> None:
        """Free the states before the last end of a block."""
        sequence = self._record(seq_id)
        if sequence is not None:
            end = num_computed // self.block_size - 1
            self._free_before(sequence, min(end, len(sequence.blocks)))

    def num_new_blocks(
        self, seq_id: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        """Return 0: its slots are not blocks of the KV pool."""
        return 0

    def attach_blocks(self, seq_id: int, hits: Sequence[int]) -> None:
        assert seq_id not in self._sequences, f"sequence {seq_id} has a table already"
        assert self.can_start(hits), "there are too few slots for states"
        sequence = _StateSequence()
        self._sequences[seq_id] = sequence
        self.num_charged += self._per_sequence
        if hits:
            self.pool.touch(hits)
            sequence.blocks.extend(hits)
            sequence.num_cached = len(hits)
            sequence.num_skipped = sequence.found = len(hits) - 1
            self.num_charged += 1

    def allocate_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        """Append entries up to the block of the last token, which gets a slot."""
        sequence = self._record(seq_id)
        assert sequence is not None
        blocks = sequence.blocks
        first, last = len(blocks), (num_tokens - 1) // self.block_size
        if last < first:
            return []
        # The step begins with the last state so far, which is also that at the end of its block.
        self._free_before(sequence, first - 1)
        new = [NULL_BLOCK] * (last - first + 1)
        if not self.pool.enable_caching and first and not sequence.receives:
            new[-1] = blocks[-1]  # the state stays in its slot
            blocks[-1] = NULL_BLOCK
        else:
            new[-1] = self._take_slot(sequence)
        if self.pool.enable_caching:
            if sequence.receives and first < last:
                new[0] = self._take_slot(sequence)
            for index in sorted({last - 1, *sequence.wanted}):
                if first <= index < last and not new[index - first] and self._has_slot(sequence):
                    new[index - first] = self._take_slot(sequence)
        sequence.receives = False
        blocks += new
        self._planned[seq_id] = first, new
        return new

    def cache_full_blocks(self, seq_id: int, content: Request, num_tokens: int) -> int:
        sequence = self._record(seq_id)
        assert sequence is not None
        block_size = self.block_size
        room_ends = len(sequence.blocks) * block_size + 1
        if not self.pool.enable_caching:
            return room_ends
        if not sequence.is_begun:
            # The prompt, and the longest part of it that the same prompt can start from.
            sequence.is_begun = True
            num_known = len(content.all_token_ids)
            sequence.kept |= {num_known // block_size - 1, (num_known - 1) // block_size - 1}
        num_full = num_tokens // block_size
        for index in range(sequence.num_cached, num_full):
            slot = sequence.blocks[index]
            if slot != NULL_BLOCK:
                self.pool.cache_full_blocks(sequence.blocks, index, index + 1, self._keys, content)
                self._fresh.add(slot)
        sequence.num_cached = max(sequence.num_cached, num_full)
        next_fills = (sequence.num_cached + 1) * block_size
        return room_ends if room_ends < next_fills else next_fills

    def free_sequence(self, seq_id: int) -> None:
        """Free the slots of a sequence; the state at the last end of a block stays findable."""
        sequence = self._record(seq_id)
        if sequence is None:
            return
        del self._sequences[seq_id]
        self._planned.pop(seq_id, None)
        sequence.kept.update(range(sequence.num_cached))
        for index in range(len(sequence.blocks) - 1, sequence.num_skipped - 1, -1):
            self._free_entry(sequence, index)
        self.num_charged -= self._per_sequence

    def rename_sequence(self, seq_id: int, new_seq_id: int) -> None:
        """Give the block table to the next turn, whose prompt ends elsewhere."""
        super().rename_sequence(seq_id, new_seq_id)
        self._planned.pop(seq_id, None)
        sequence = self._record(new_seq_id)
        assert sequence is not None
        sequence.is_begun = False

    def block_table(self, seq_id: int) -> list[int]:
        """Return a copy of the block table; without prefix caching the one slot in all entries.

        The state after the last token is then in that slot, whichever block the token is in.
        """
        blocks = super().block_table(seq_id)
        return blocks if self.pool.enable_caching else blocks[-1:] * len(blocks)

    def num_valid_tokens(self, seq_id: int, bad_blocks: Collection[int]) -> int | None:
        """Return 0: a state that was not loaded is needed by all tokens after it."""
        return 0

    def prefix_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        """Return nothing: its slots are not blocks of the KV pool."""
        return []

    def cached_blocks(self, seq_id: int, first_token: int) -> list[tuple[int, int]]:
        """Return nothing: its slots are not blocks of the KV pool."""
        return []

    def violations(self, seq_id: int, unchanged_below: int) -> list[str]:
        found = []
        sequence = self._record(seq_id)
        assert sequence is not None
        blocks, hashes = sequence.blocks, self.pool.hashes
        num_held = sum(1 for block in blocks if block != NULL_BLOCK)
        if sequence.num_own != num_held - (sequence.found >= 0):
            found.append(
                f"slots: sequence {seq_id} counts {sequence.num_own} of its own, holds {num_held}"
            )
        if blocks and blocks[-1] == NULL_BLOCK:
            found.append(f"current state: sequence {seq_id} has none")
        if any(blocks[: sequence.num_skipped]):
            found.append(f"skipped states: sequence {seq_id} holds some")
        if any(hashes[block] is not None for block in blocks[sequence.num_cached :]):
            found.append(f"cached count: sequence {seq_id} has a state that is findable too early")
        if unchanged_below > len(blocks) * self.block_size + 1:
            found.append(f"room: sequence {seq_id} is not checked before its table ends")
        records = map(self._record, self._sequences)
        charged = sum(self._charge_of(record) for record in records if record is not None)
        if charged != self.num_charged or self._num_spare < 0:
            found.append(
                f"charge: sequences may need {charged} slots of {self._num_usable}, "
                f"{self.num_charged} are recorded, and copies use {self.transfer_refs.num_blocks}"
            )
        return found

    def _record(self, seq_id: int) -> _StateSequence | None:
        sequence = self._sequences.get(seq_id)
        assert sequence is None or isinstance(sequence, _StateSequence)
        return sequence

    @property
    def _num_spare(self) -> int:
        """Slots that neither sequences nor copies may need."""
        return self._num_usable - self.num_charged - self.transfer_refs.num_blocks

    def _has_slot(self, sequence: _StateSequence) -> bool:
        """Return whether a sequence may take one more slot."""
        return sequence.num_own < self._per_sequence or self._num_spare > 0

    def _charge_of(self, sequence: _StateSequence) -> int:
        return max(self._per_sequence, sequence.num_own) + (sequence.found >= 0)

    def _take_slot(self, sequence: _StateSequence) -> int:
        before = self._charge_of(sequence)
        sequence.num_own += 1
        self.num_charged += self._charge_of(sequence) - before
        return self.pool.get_new_blocks(1)[0]

    def _free_before(self, sequence: _StateSequence, end: int) -> None:
        for index in range(sequence.num_skipped, end):
            self._free_entry(sequence, index)
        sequence.num_skipped = max(sequence.num_skipped, end)

    def _free_entry(self, sequence: _StateSequence, index: int) -> None:
        slot = sequence.blocks[index]
        if slot == NULL_BLOCK:
            return
        before = self._charge_of(sequence)
        stays = index in sequence.kept
        if index == sequence.found:
            sequence.found = -1
            stays = True
        else:
            sequence.num_own -= 1
        self.num_charged += self._charge_of(sequence) - before
        sequence.blocks[index] = NULL_BLOCK
        if not stays and self.pool.ref_counts[slot] == 1:
            self.pool.uncache([slot])
        self.pool.free_blocks([slot])
        if self.pool.hashes[slot] is None:
            self.pool.free_queue.move_to_front([slot])


GROUP_KINDS: Final[dict[str, type[CacheGroup]]] = {
    NOT_CACHED: UncachedGroup,
    RECURRENT_STATE: RecurrentStateGroup,
    FULL_ATTENTION: FullAttentionGroup,
    SLIDING_WINDOW: SlidingWindowGroup,
}
"""The classes of groups by the kind that a group's specification names."""


def group_class(spec: KVGroupSpec) -> type[CacheGroup]:
    """Return the class of a group; a specification without a kind is one of attention."""
    if spec.kind:
        return GROUP_KINDS[spec.kind]
    return GROUP_KINDS[FULL_ATTENTION if spec.sliding_window is None else SLIDING_WINDOW]
