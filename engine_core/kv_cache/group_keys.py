"""How the blocks of a KV group are named in the prefix index.

Every group holds other layers, so the same tokens are other content in each: a
key is the block hash followed by the group's number. Nothing follows for group
0, so that a model with one group is looked up by its hashes as they are.

A hash covers `hash_block_size` tokens and, through the chain, all before them. A
group with larger blocks takes the hash that ends where its block ends:

    hashes           | h0 | h1 | h2 | h3 |
    blocks twice as  |   h1    |   h3    |
    large are known as
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

HASH_BYTES: Final = 32


class GroupKeys:
    """Names the blocks of group `number`, which hold `block_size` tokens each.

    block_size is a multiple of hash_block_size.
    """

    __slots__ = ("_stride", "_suffix", "block_size", "number")

    def __init__(self, number: int, block_size: int, hash_block_size: int) -> None:
        assert block_size % hash_block_size == 0, f"hashes of {hash_block_size} in {block_size}"
        self.number = number
        self.block_size = block_size
        self._stride = block_size // hash_block_size
        self._suffix = bytes([number]) if number else b""

    def key(self, block_hashes: Sequence[bytes], index: int) -> bytes:
        """The key of the group's block `index` of a sequence with these hashes."""
        return block_hashes[(index + 1) * self._stride - 1] + self._suffix

    def leading(self, block_hashes: Sequence[bytes], count: int) -> Iterator[bytes]:
        """The keys of the first `count` blocks, or of those that have a hash."""
        stride, suffix = self._stride, self._suffix
        ends = islice(block_hashes, stride - 1, count * stride, stride)
        return (block_hash + suffix for block_hash in ends) if suffix else ends

    def hashes(self, block_hashes: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """The hashes, without the group, of the blocks [first, end)."""
        stride = self._stride
        return list(block_hashes[(first + 1) * stride - 1 : end * stride : stride])

    def count(self, block_hashes: Sequence[bytes]) -> int:
        """Blocks that have a hash."""
        return len(block_hashes) // self._stride


def parts(key: bytes) -> tuple[bytes, int]:
    """(block hash, number of the group) of a key."""
    return key[:HASH_BYTES], key[HASH_BYTES] if len(key) > HASH_BYTES else 0
