"""Names of offloaded blocks.

    hashes           | h0 | h1 | h2 | h3 | h4 | h5 | h6 | h7 |        of device blocks
    factor 4         |         h3        |         h7        |
    key              h3 ‖ group (1 byte) ‖ ranks (2) ‖ factor (2)

The hash covers all tokens before its end. What follows it tells the same tokens apart where other
layers, another part of the heads, or another number of tokens is meant.
"""

import struct
from collections.abc import Sequence
from typing import Final

from engine_core.kv_cache.hashing import HASH_BYTES
from engine_core.kv_connector.offload.base import OffloadKey

_SUFFIX: Final = struct.Struct("<BHH")


class OffloadKeys:
    """Makes keys of one engine's offloaded blocks."""

    def __init__(self, num_groups: int, num_ranks: int, factor: int) -> None:
        self.factor = factor
        self._suffixes = [_SUFFIX.pack(group, num_ranks, factor) for group in range(num_groups)]

    def of(
        self, block_hashes: Sequence[bytes], group: int, first: int, end: int
    ) -> list[OffloadKey]:
        """Keys of a group's offloaded blocks [first, end) of a sequence with these hashes."""
        factor, suffix = self.factor, self._suffixes[group]
        hashes = block_hashes[(first + 1) * factor - 1 : end * factor : factor]
        return [each + suffix for each in hashes]


def parts(key: OffloadKey) -> tuple[bytes, int]:
    """(hash, group) of a key."""
    return key[:HASH_BYTES], key[HASH_BYTES]
