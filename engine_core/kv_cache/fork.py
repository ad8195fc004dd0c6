"""Forks: a sequence that begins with the KV of another one.

    source   | 7 | 3 | 9 | 5 |      its first tokens end within block 9
    fork     | 7 | 3 | 12 |         7 and 3 are shared, 9 is copied to 12

Blocks that the tokens fill are referenced once more, as a prefix hit is. The one
they end in will hold other tokens in each sequence, so the fork takes a block of its
own and the worker copies what is in it, before it computes anything of the step.

Owns the copies that the next step has to make. Knows tables, not requests.
"""

from collections.abc import Iterable, Sequence

from engine_core.kv_cache.block import NULL_BLOCK, BlockIds
from engine_core.kv_cache.coordinator import NOTHING_COMPUTED, ComputedBlocks
from engine_core.kv_cache.groups import FullAttentionGroup


def fork_of(groups: Sequence[FullAttentionGroup], seq_id: int, num_tokens: int) -> ComputedBlocks:
    """What a new sequence can start from that shares its first tokens with sequence `seq_id`.

    NOTHING_COMPUTED where a window of the source has passed what the next token sees.
    """
    shared, tails = [], []
    for group in groups:
        blocks = group.find_fork(seq_id, num_tokens)
        if not blocks:
            return NOTHING_COMPUTED
        num_full = num_tokens // group.block_size
        shared.append(blocks[:num_full])
        tails.append(blocks[num_full] if len(blocks) > num_full else NULL_BLOCK)
    return ComputedBlocks(tuple(shared), num_tokens, tuple(tails))


class BlockCopies:
    """Block copies that were promised since the last step left."""

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}

    @property
    def pending(self) -> bool:
        """There are any."""
        return bool(self._source_of)

    def promise(self, computed: ComputedBlocks, new_blocks: BlockIds) -> None:
        """A fork was given its first new blocks: each group's tail goes into the first of them.

        Should the source be given away before the step, its content is still copied in
        time: whoever has it by then writes to it in that step at the earliest. A copy
        that is not made yet is no source: what it is to hold lies in its own source.
        """
        for tail, blocks in zip(computed.tails, new_blocks, strict=False):
            if tail != NULL_BLOCK:
                self._source_of[blocks[0]] = self._source_of.get(tail, tail)

    def cancel(self, blocks: Iterable[int]) -> None:
        """The fork is over; its blocks may be anybody's."""
        for block in blocks:
            self._source_of.pop(block, None)

    def take(self) -> list[int]:
        """Source, copy, source, copy …, since the last call."""
        if not self._source_of:
            return []
        taken = [block for copy, source in self._source_of.items() for block in (source, copy)]
        self._source_of.clear()
        return taken
