"""Block hashes: names for the content of full blocks, the same in every process.

    hash of block 0 = SHA-256(a constant ‖ the model fingerprint ‖ its tokens ‖ the salt)
    hash of block i = SHA-256(hash of block i - 1 ‖ its tokens)

Tokens are little-endian uint32. The salt of a client, if there is one, is "cache_salt:" and its
text, with the length in front as little-endian uint32. Nothing is random per process, so restarts,
ranks and stores on disk agree. It is SHA-256 because a collision would show one client the KV of
another.

    GroupKeys      names of blocks in the prefix index, per KV cache group
    HashChain      hashes runs of blocks, by hashlib or in one call of C
    BlockHasher    extends the block hashes of a request
"""

import ctypes
import struct
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_char_p, c_int, c_int64
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Final

from engine_core import build_native

_SALT_TAG: Final = b"cache_salt:"
HASH_BYTES: Final = 32


class GroupKeys:
    """Keys of the blocks of one KV cache group in the prefix index.

    Each group holds other layers, so the same tokens are different content: a key is the block hash
    followed by the group's number. Nothing follows for group 0, so a model with one group is
    looked up by the hashes themselves.

    A hash covers `hash_block_size` tokens and, through the chain, all before them. block_size is a
    multiple of it; a larger block has the hash that ends where the block ends:

        hashes              | h0 | h1 | h2 | h3 |
        blocks twice as large |  h1   |   h3    |
    """

    __slots__ = ("_stride", "_suffix", "block_size", "number")

    def __init__(self, number: int, block_size: int, hash_block_size: int) -> None:
        assert block_size % hash_block_size == 0, f"hashes of {hash_block_size} in {block_size}"
        self.number = number
        self.block_size = block_size
        self._stride = block_size // hash_block_size
        self._suffix = bytes([number]) if number else b""

    def key(self, block_hashes: Sequence[bytes], index: int) -> bytes:
        """Return the key of the group's block `index` of a sequence with these hashes."""
        return block_hashes[(index + 1) * self._stride - 1] + self._suffix

    def leading(self, block_hashes: Sequence[bytes], count: int) -> Iterator[bytes]:
        """Return the keys of the first `count` blocks, as far as they have a hash."""
        stride, suffix = self._stride, self._suffix
        ends = islice(block_hashes, stride - 1, count * stride, stride)
        return (block_hash + suffix for block_hash in ends) if suffix else ends

    def hashes(self, block_hashes: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """Return the hashes, without the group's number, of the blocks [first, end)."""
        stride = self._stride
        return list(block_hashes[(first + 1) * stride - 1 : end * stride : stride])

    def count(self, block_hashes: Sequence[bytes]) -> int:
        return len(block_hashes) // self._stride


def split_key(key: bytes) -> tuple[bytes, int]:
    """Return (block hash, number of the group) of a key."""
    return key[:HASH_BYTES], key[HASH_BYTES] if len(key) > HASH_BYTES else 0


DIGEST_BYTES: Final = 32

_SHORT: Final = 4
"""Up to this many blocks, hashlib is faster than ctypes; a decode fills one block."""


class HashlibChain:
    """Hashes runs of blocks of equal length; the digest of a block enters the next message.

    parent ──▶ SHA-256(parent ‖ block 0) ──▶ SHA-256(· ‖ block 1) ──▶ …
    """

    def __init__(self, block_bytes: int) -> None:
        self._split = struct.Struct(f"{block_bytes}s").iter_unpack

    def digests(self, parent: bytes, blocks: bytes) -> Iterable[bytes]:
        """Return a digest for each block.

        parent: [32]. blocks: [num_blocks, block_bytes], block after block.
        """
        digests = []
        for (block,) in self._split(blocks):
            parent = sha256(parent + block).digest()
            digests.append(parent)
        return digests


class NativeChain:
    """Hashes long runs in one call of csrc/block_hash.c, and short ones with hashlib.

    A message is only two chunks of SHA-256, so most of a call of hashlib is overhead.
    with_instructions: use the SHA-256 instructions, which the CPU must have.
    """

    def __init__(self, block_bytes: int, library: ctypes.CDLL, with_instructions: bool) -> None:
        """Raises AttributeError for a library without the function."""
        self._block_bytes = block_bytes
        self._short_bytes = _SHORT * block_bytes
        self._hash_blocks = library.tokend_hash_blocks
        self._hash_blocks.argtypes = [c_int, c_char_p, c_char_p, c_int64, c_int64, c_char_p]
        self._hash_blocks.restype = c_int
        self._with_instructions = with_instructions
        self._short = HashlibChain(block_bytes).digests
        self._split = struct.Struct(f"{DIGEST_BYTES}s").iter_unpack

    def digests(self, parent: bytes, blocks: bytes) -> Iterable[bytes]:
        if len(blocks) <= self._short_bytes:
            return self._short(parent, blocks)
        block_bytes = self._block_bytes
        num_blocks = len(blocks) // block_bytes
        written = ctypes.create_string_buffer(num_blocks * DIGEST_BYTES)
        if self._hash_blocks(
            self._with_instructions, parent, blocks, num_blocks, block_bytes, written
        ):
            raise MemoryError("no memory for the message of a block")
        return chain.from_iterable(self._split(written))


HashChain = HashlibChain | NativeChain


def load_hash_chain(block_bytes: int, folder: Path = build_native.SOURCE_DIR) -> HashChain:
    """Return the compiled chain if there is a library in `folder`, otherwise the one of hashlib."""
    try:
        # PyDLL keeps the GIL: a call is shorter than releasing it may take.
        library = ctypes.PyDLL(str(build_native.library(build_native.BLOCK_HASH, folder)))
        return NativeChain(block_bytes, library, bool(library.tokend_has_sha_instructions()))
    except (OSError, AttributeError):
        return HashlibChain(block_bytes)


ROOT: Final = b"tokend kv block hash, version 1\n"
_TOKEN_BYTES: Final = 4


class BlockHasher:
    """Hashes full blocks of `block_size` tokens for the model with this fingerprint (see above)."""

    def __init__(self, block_size: int, fingerprint: bytes) -> None:
        self.block_size = block_size
        self.root = ROOT + fingerprint
        self._block_bytes = _TOKEN_BYTES * block_size
        self._digests = load_hash_chain(self._block_bytes).digests

    def extend(
        self, block_hashes: list[bytes], token_ids: Sequence[int], cache_salt: str | None = None
    ) -> None:
        """Append the hashes of the full blocks that `block_hashes` does not cover yet.

        token_ids: [num_tokens], each in [0, 2^32).
        cache_salt: the same for all calls of a request.
        """
        size = self.block_size
        start = len(block_hashes) * size
        end = len(token_ids) // size * size
        if start >= end:
            return
        blocks = struct.pack(f"<{end - start}I", *token_ids[start:end])
        if start == 0:
            first, blocks = blocks[: self._block_bytes], blocks[self._block_bytes :]
            content = self.root + first + _salt_bytes(cache_salt)
            block_hashes.append(sha256(content).digest())
        block_hashes.extend(self._digests(block_hashes[-1], blocks))


def salt_key(cache_salt: str | None) -> int:
    """Return 64 bits that stand for a cache salt; 0 without one."""
    if cache_salt is None:
        return 0
    return int.from_bytes(sha256(_salt_bytes(cache_salt)).digest()[:8], "little")


def _salt_bytes(cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return b""
    key = _SALT_TAG + cache_salt.encode()
    return struct.pack("<I", len(key)) + key
