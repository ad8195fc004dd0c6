"""KV groups: layers that share one block table per sequence.

A group owns the block tables of its sequences and decides which blocks a
number of tokens needs. Blocks come from the pool that all groups share.
Sequences are named by their seq_ids; requests are unknown here.
"""

from collections.abc import Sequence

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.hashing import GroupKeys, parts
from engine_core.kv_cache.pool import BlockPool, HashedTokens


class _Sequence:
    """What a group knows of one sequence.

    blocks: the table. num_cached: how many of its leading blocks were offered to
    the index. num_passed: how many of them are null, because no token needs them.
    """

    __slots__ = ("blocks", "num_cached", "num_passed")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_cached = 0
        self.num_passed = 0


class FullAttentionGroup:
    """Block tables of layers that attend to every earlier position: a table keeps all its blocks.

    Other kinds of groups extend this one and override what differs.
    block_size: tokens in a block of this group.
    has_prefixes: any first part of a hit is a hit as well.

    block table   | 7 | 3 | 9 | 12 |
    tokens        [0, bs) [bs, 2bs) …
    """

    has_prefixes = True

    def __init__(self, pool: BlockPool, keys: GroupKeys) -> None:
        self.block_size = keys.block_size
        self._pool = pool
        self._keys = keys
        self._sequences: dict[int, _Sequence] = {}

    def find_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        """Blocks of the longest cached prefix of at most `max_tokens` tokens.

        Null blocks stand for those that no later token needs.
        """
        most = max_tokens // self.block_size
        return self._pool.index.longest_prefix(self._keys.leading(block_hashes, most))

    def find_fork(self, seq_id: int, num_tokens: int) -> list[int]:
        """The blocks of a sequence that hold its first tokens, the last one perhaps in part.

        Null blocks stand for those that no later token needs. Empty when the
        sequence has given back one that a later token does need.
        """
        return self._sequences[seq_id].blocks[: -(-num_tokens // self.block_size)]

    def release_passed(self, seq_id: int, num_computed: int) -> None:
        """Nothing: every later token needs all blocks."""

    def num_new_blocks(
        self, seq_id: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        """Blocks that `extend` would append; changes nothing.

        num_hits: blocks that `attach` will start the table with, if there is none yet.
        num_computed: position with which `release_passed` will be called before, 0 for not at all.
        """
        sequence = self._sequences.get(seq_id)
        num_held = num_hits if sequence is None else len(sequence.blocks)
        num_new = -(-num_tokens // self.block_size) - num_held
        return num_new if num_new > 0 else 0

    def attach(self, seq_id: int, hits: Sequence[int]) -> None:
        """Start a sequence's table with cached blocks, referencing them."""
        assert seq_id not in self._sequences, f"sequence {seq_id} has a table already"
        sequence = self._sequences[seq_id] = _Sequence()
        if hits:
            self._pool.touch(hits)
            sequence.blocks.extend(hits)
            sequence.num_cached = len(hits)

    def extend(self, seq_id: int, num_tokens: int) -> list[int]:
        """Append new blocks until the table has room for `num_tokens`; returns them."""
        blocks = self._sequences[seq_id].blocks
        num_new = -(-num_tokens // self.block_size) - len(blocks)
        if num_new <= 0:
            return []
        new_blocks = self._pool.get_new_blocks(num_new)
        blocks.extend(new_blocks)
        return new_blocks

    def register_full_blocks(self, seq_id: int, content: HashedTokens, num_tokens: int) -> int:
        """Make the blocks filled by the first `num_tokens` tokens findable.

        content: the sequence's tokens and hashes, if prefixes are cached at all.
        Returns a number of slots: as long as fewer are wanted for this sequence,
        neither release_passed nor extend nor settle has work.
        """
        sequence = self._sequences[seq_id]
        block_size = self.block_size
        room_ends = len(sequence.blocks) * block_size + 1
        if not self._pool.enable_caching:
            return room_ends
        num_full = num_tokens // block_size
        if num_full > sequence.num_cached:
            first = max(sequence.num_cached, sequence.num_passed)
            self._pool.cache_full_blocks(sequence.blocks, first, num_full, self._keys, content)
            sequence.num_cached = num_full
        next_fills = (sequence.num_cached + 1) * block_size
        return room_ends if room_ends < next_fills else next_fills

    def withdraw(self, seq_id: int, num_tokens: int) -> None:
        """Take the blocks after the first `num_tokens` tokens out of the prefix index.

        The table keeps them, and settle does not offer them again.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            num_kept = num_tokens // self.block_size
            self._pool.uncache(sequence.blocks[num_kept : sequence.num_cached])

    def forget(self, block_hashes: Sequence[bytes]) -> None:
        """Take every block with one of these hashes out of the prefix index."""
        most = self._keys.count(block_hashes)
        for key in self._keys.leading(block_hashes, most):
            self._pool.forget(key)

    def rename(self, seq_id: int, new_seq_id: int) -> None:
        """The sequence, which has a table, has another seq_id from now on."""
        assert new_seq_id not in self._sequences, f"sequence {new_seq_id} has a table already"
        self._sequences[new_seq_id] = self._sequences.pop(seq_id)

    def free(self, seq_id: int) -> None:
        """Give back a sequence's blocks, last one first; nothing if it has none."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._pool.free_blocks(sequence.blocks[::-1])

    def table(self, seq_id: int) -> list[int]:
        """A copy of the sequence's block ids, [num_blocks]; empty if it has none."""
        sequence = self._sequences.get(seq_id)
        return [] if sequence is None else sequence.blocks.copy()

    def tables(self) -> dict[int, list[int]]:
        """The tables themselves, by seq_id; to be read only."""
        return {seq_id: sequence.blocks for seq_id, sequence in self._sequences.items()}

    def violations(self, seq_id: int) -> list[str]:
        """What is wrong with a sequence's table by the group's own rules, a sentence each."""
        found = []
        sequence = self._sequences[seq_id]
        blocks, num_passed = sequence.blocks, sequence.num_passed
        if NULL_BLOCK in blocks[num_passed:]:
            found.append(f"null block: it stands in the table of sequence {seq_id}")
        if any(blocks[:num_passed]) or num_passed > len(blocks):
            found.append(
                f"passed blocks: sequence {seq_id} counts {num_passed}, not all of them null"
            )
        # A withdrawn block has no hash although its sequence counts it.
        early = [block for block in blocks[sequence.num_cached :] if self._key_on(block)]
        if early or sequence.num_cached > len(blocks):
            found.append(
                f"cached count: sequence {seq_id} counts {sequence.num_cached} cached blocks "
                f"of {len(blocks)}, but of the others {len(early)} have a hash"
            )
        found += [
            f"group: block {block} of sequence {seq_id} is in group {self._keys.number} "
            f"but cached for group {parts(key)[1]}"
            for block in blocks
            if (key := self._key_on(block)) and parts(key)[1] != self._keys.number
        ]
        return found

    def _key_on(self, block: int) -> bytes | None:
        """None also for what is no block, which the check of the pool names."""
        hashes = self._pool.hashes
        return hashes[block] if 0 <= block < len(hashes) else None


# The KV group of layers that look back over a window only.
#
# token p attends to          [p - window + 1, p]
# computed, next position n   tokens before n - window + 1 are passed for good
#
# block table   | 0 | 0 | 9 | 12 | 4 |      0: the null block, for what is passed
#                         ^ num_passed = 2


class SlidingWindowGroup(FullAttentionGroup):
    """Keeps a table as full attention does, but gives back the blocks that are passed.

    window: tokens that a token sees, itself among them; at least 1.
    """

    has_prefixes = False

    def __init__(self, pool: BlockPool, keys: GroupKeys, window: int) -> None:
        assert window >= 1, f"a token sees at least itself, got a window of {window}"
        super().__init__(pool, keys)
        self._window = window
        # A window of one token needs no block, but a hit is something that was computed.
        self._num_seen_blocks = max(1, -(-(window - 1) // keys.block_size))

    def find_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        """Search from the end: the first token after a hit needs the last window - 1 ones.

            found          no  no  yes no  yes yes no        with two blocks in a window
            hit            |0 | 0 | 0 | 0 | 5 | 6 |

        Near the start fewer blocks are enough, if they are all that there are.
        """
        wanted = self._num_seen_blocks
        first = self._pool.index.get
        end = min(max_tokens // self.block_size, self._keys.count(block_hashes))
        run: list[int] = []
        for index in range(end - 1, -1, -1):
            block = first(self._keys.key(block_hashes, index))
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) == wanted:
                return [NULL_BLOCK] * index + run[::-1]
        return run[::-1]

    def find_fork(self, seq_id: int, num_tokens: int) -> list[int]:
        """As for full attention, with null blocks for what is out of sight.

        sequence   |0 | 0 | 9 | 12 | 4 |
        fork       |0 | 0 | 0 | 12 |          ends in block 12 and sees nothing of block 9
        """
        num_passed = max(0, num_tokens - self._window + 1) // self.block_size
        seen = super().find_fork(seq_id, num_tokens)[num_passed:]
        return [] if NULL_BLOCK in seen else [NULL_BLOCK] * num_passed + seen

    def attach(self, seq_id: int, hits: Sequence[int]) -> None:
        super().attach(seq_id, hits)
        self._sequences[seq_id].num_passed = sum(1 for block in hits if block == NULL_BLOCK)

    def num_new_blocks(
        self, seq_id: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        sequence = self._sequences.get(seq_id)
        num_held = num_hits if sequence is None else len(sequence.blocks)
        num_passed = (num_computed - self._window + 1) // self.block_size
        num_new = -(-num_tokens // self.block_size) - max(num_held, num_passed)
        return num_new if num_new > 0 else 0

    def release_passed(self, seq_id: int, num_computed: int) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return
        start, end = sequence.num_passed, (num_computed - self._window + 1) // self.block_size
        if end <= start:
            return
        blocks = sequence.blocks
        blocks += [NULL_BLOCK] * (end - len(blocks))  # KV from elsewhere may begin behind the table
        self._pool.free_blocks(blocks[start:end][::-1])
        blocks[start:end] = [NULL_BLOCK] * (end - start)
        sequence.num_passed = end

    def register_full_blocks(self, seq_id: int, content: HashedTokens, num_tokens: int) -> int:
        """As for full attention; whoever wants `passes` slots may have passed one more block."""
        mark = super().register_full_blocks(seq_id, content, num_tokens)
        passes = (self._sequences[seq_id].num_passed + 1) * self.block_size + self._window
        return mark if mark < passes else passes

    def free(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._pool.free_blocks(sequence.blocks[sequence.num_passed :][::-1])
