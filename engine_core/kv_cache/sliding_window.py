"""The KV group of layers that look back over a window only.

token p attends to          [p - window + 1, p]
computed, next position n   tokens before n - window + 1 are passed for good

block table   | 0 | 0 | 9 | 12 | 4 |      0: the null block, for what is passed
                        ^ num_passed = 2
"""

from collections.abc import Sequence

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.group_keys import GroupKeys
from engine_core.kv_cache.groups import FullAttentionGroup
from engine_core.kv_cache.pool import BlockPool, HashedTokens


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

    def find_fork(self, handle: int, num_tokens: int) -> list[int]:
        """As for full attention, with null blocks for what is out of sight.

        sequence   |0 | 0 | 9 | 12 | 4 |
        fork       |0 | 0 | 0 | 12 |          ends in block 12 and sees nothing of block 9
        """
        num_passed = max(0, num_tokens - self._window + 1) // self.block_size
        seen = super().find_fork(handle, num_tokens)[num_passed:]
        return [] if NULL_BLOCK in seen else [NULL_BLOCK] * num_passed + seen

    def attach(self, handle: int, hits: Sequence[int]) -> None:
        super().attach(handle, hits)
        self._sequences[handle].num_passed = sum(1 for block in hits if block == NULL_BLOCK)

    def num_new_blocks(
        self, handle: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        sequence = self._sequences.get(handle)
        num_held = num_hits if sequence is None else len(sequence.blocks)
        num_passed = (num_computed - self._window + 1) // self.block_size
        num_new = -(-num_tokens // self.block_size) - max(num_held, num_passed)
        return num_new if num_new > 0 else 0

    def release_passed(self, handle: int, num_computed: int) -> None:
        sequence = self._sequences.get(handle)
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

    def settle(self, handle: int, content: HashedTokens, num_tokens: int) -> int:
        """As for full attention; whoever wants `passes` slots may have passed one more block."""
        mark = super().settle(handle, content, num_tokens)
        passes = (self._sequences[handle].num_passed + 1) * self.block_size + self._window
        return mark if mark < passes else passes

    def free(self, handle: int) -> None:
        sequence = self._sequences.pop(handle, None)
        if sequence is not None:
            self._pool.free_blocks(sequence.blocks[sequence.num_passed :][::-1])
