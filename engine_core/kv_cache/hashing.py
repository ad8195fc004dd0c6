"""Block hashes: names for the content of full blocks, the same in every process.

Owns what enters a hash. Knows token ids and extra keys, not requests or blocks.

    hash of block i = SHA-256(parent ‖ tokens of block i ‖ extra keys of block i)

parent is the hash of block i - 1; for block 0 a fixed constant ‖ the model
fingerprint. Tokens are little-endian uint32. An extra key is its length as
little-endian uint32 ‖ its bytes, which begin with its kind. Nothing in it is
drawn per process, so restarts, ranks and stores on disk agree; SHA-256 because a
collision would show one client the KV of another.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, Protocol

from engine_core.kv_cache.extra_keys import NO_EXTRA_KEYS, ExtraKeys
from engine_core.kv_cache.hash_chain import load_hash_chain

ROOT: Final = b"tokend kv block hash, version 1\n"
_TOKEN_BYTES: Final = 4


class Hasher(Protocol):
    """Extends the hash chain of a request."""

    def extend(
        self,
        block_hashes: list[bytes],
        token_ids: Sequence[int],
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        """Append to `block_hashes` until it covers every full block of `token_ids`."""


class BlockHasher:
    """Hashes full blocks of `block_size` tokens for the model with this fingerprint."""

    def __init__(self, block_size: int, fingerprint: bytes) -> None:
        self.block_size = block_size
        self.root = ROOT + fingerprint
        self._block_bytes = _TOKEN_BYTES * block_size
        self._digests = load_hash_chain(self._block_bytes).digests

    def extend(
        self,
        block_hashes: list[bytes],
        token_ids: Sequence[int],
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        """Append the hashes of the full blocks that `block_hashes` does not cover yet.

        token_ids: [num_tokens], each in [0, 2^32).
        extra_keys: what else the KV depends on; the same for all calls of a request.
        """
        size = self.block_size
        start = len(block_hashes) * size
        end = len(token_ids) // size * size
        if start >= end:
            return
        blocks = struct.pack(f"<{end - start}I", *token_ids[start:end])
        if start == 0:
            first, blocks = blocks[: self._block_bytes], blocks[self._block_bytes :]
            content = self.root + first + extra_keys.of_block(0, size)
            block_hashes.append(sha256(content).digest())
        if extra_keys.media:
            self._extend_with_media(block_hashes, blocks, extra_keys)
        else:
            block_hashes.extend(self._digests(block_hashes[-1], blocks))

    def _extend_with_media(
        self, block_hashes: list[bytes], blocks: bytes, extra_keys: ExtraKeys
    ) -> None:
        """Block by block, since each has keys of its own."""
        for start in range(0, len(blocks), self._block_bytes):
            at = len(block_hashes) * self.block_size
            content = block_hashes[-1] + blocks[start : start + self._block_bytes]
            content += extra_keys.of_block(at, at + self.block_size)
            block_hashes.append(sha256(content).digest())


class NoHashing:
    """Stands in where prefixes are not cached: no block ever has a hash."""

    def extend(
        self,
        block_hashes: list[bytes],
        token_ids: Sequence[int],
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        """Append nothing."""
