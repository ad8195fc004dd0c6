"""Who may watch the blocks of a pool: the events of the prefix cache, and residency.

Owns nothing of the pool. A pool without observers does not know that they exist.
"""

from collections.abc import Sequence

from engine_core.kv_cache.group_keys import GroupKeys
from engine_core.kv_cache.pool import HashedTokens


class PoolObserver:
    """Told what happens to blocks, after it happened; ignores what it does not override.

    The null block is never reported. For a reused block `removed` comes before
    `allocated`.
    """

    def allocated(self, blocks: Sequence[int]) -> None:
        """Blocks were taken from the free queue to be written."""

    def touched(self, blocks: Sequence[int]) -> None:
        """A request found blocks and starts from them."""

    def freed(self, blocks: Sequence[int]) -> None:
        """Nobody references these blocks any more; those with a hash may still be found."""

    def stored(
        self, table: Sequence[int], first: int, end: int, keys: GroupKeys, content: HashedTokens
    ) -> None:
        """The blocks [first, end) of a sequence, first < end, can be found from now on."""

    def withdrawn(self, blocks: Sequence[int]) -> None:
        """Blocks are about to lose their hashes because their content is wrong."""

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        """A block lost its hash; with the last one of a key the content is gone."""

    def cleared(self) -> None:
        """All hashes were forgotten; no block was in use."""
