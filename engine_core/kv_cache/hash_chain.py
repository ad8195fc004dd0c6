"""Chains of SHA-256: the digest of each block enters the message of the next one.

    parent ──▶ SHA-256(parent ‖ block 0) ──▶ SHA-256(· ‖ block 1) ──▶ …

Owns the choice between hashlib and the compiled function of csrc/block_hash.c, which
hashes a whole run of blocks in one call; the digests are the same. A message is two
chunks of SHA-256, so that most of a call of hashlib is the way there and back.
"""

import ctypes
import struct
from collections.abc import Iterable
from ctypes import c_char_p, c_int, c_int64
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Final, Protocol

from engine_core import build_native

DIGEST_BYTES: Final = 32

_SHORT: Final = 4
"""Blocks of a run that hashlib has hashed before a call through ctypes has begun: a
request that decodes fills one at a time."""


class HashChain(Protocol):
    """Hashes runs of blocks that are all equally long."""

    def digests(self, parent: bytes, blocks: bytes) -> Iterable[bytes]:
        """A digest for each block.

        parent: [32]. blocks: [num_blocks, block_bytes], block after block.
        """


class HashlibChain:
    """Works everywhere."""

    def __init__(self, block_bytes: int) -> None:
        self._split = struct.Struct(f"{block_bytes}s").iter_unpack

    def digests(self, parent: bytes, blocks: bytes) -> Iterable[bytes]:
        digests = []
        for (block,) in self._split(blocks):
            parent = sha256(parent + block).digest()
            digests.append(parent)
        return digests


class NativeChain:
    """Long runs in one call, short ones with hashlib.

    with_instructions: use the CPU's SHA-256 instructions; only if it has them.
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


def load_hash_chain(block_bytes: int, folder: Path = build_native.SOURCE.parent) -> HashChain:
    """The compiled function if there is one in `folder`, otherwise hashlib."""
    try:
        # Keeps the interpreter's lock: a call is shorter than giving it away may take.
        library = ctypes.PyDLL(str(build_native.library(folder)))
        return NativeChain(block_bytes, library, bool(library.tokend_has_sha_instructions()))
    except (OSError, AttributeError):
        return HashlibChain(block_bytes)
