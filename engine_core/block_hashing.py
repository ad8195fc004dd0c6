"""Block hashes: names for the content of full blocks, the same in every process.

    hash of block 0 = SHA-256(a constant ‖ the model fingerprint ‖ its tokens ‖ its extra keys)
    hash of block i = SHA-256(hash of block i - 1 ‖ its tokens ‖ its extra keys)

Tokens are little-endian uint32. Most blocks have no extra keys; each is "kind:value" with its
length in front as little-endian uint32. Nothing is random per process, so restarts, ranks and
stores on disk agree. It is SHA-256 because a collision would show one client the KV of another.

    ExtraKeys      what besides its tokens decides the KV of a sequence
    GroupKeys      names of blocks in the prefix index, per KV cache group
    HashChain      hashes runs of blocks, by hashlib or in one call of C
    BlockHasher    extends the block hashes of a request
"""

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_char_p, c_int, c_int64
from hashlib import sha256
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from engine_core import build_native
from proto.messages.lora import LoRARequest
from proto.messages.multimodal import MultiModalFeature

HASH_BYTES: Final = 32
"""Length of a block hash."""


class ExtraKey(NamedTuple):
    """A key of a block besides its tokens. kind: what it stands for. value: its bytes."""

    kind: str
    value: bytes


_end_of: Final = attrgetter("end")


class ExtraKeys:
    """What besides its tokens decides the KV of a sequence: for each block an ordered list of keys.

    A key of one block enters the hashes of all later ones through the chain.

    lora_request: the adapter; its content, and its scale unless that is 1, are in the first block.
        So equal contents share KV under any name, and a name that was reloaded shares none.
    cache_salt: in the first block.
    prompt_embeds: num_prompt_tokens rows of equal length that stand in place of tokens;
        empty for none. A block has the digest of its rows, so equal beginnings are shared.
    mm_features: images of the prompt, in its order. A block has the hash of each image in it, and
        where the image begins, counted from the block. So text before the first image is shared.
    end: position from which on no block has a key of its own, so that runs are hashed together.
    digest: 32 bytes that stand for all keys; empty without any. Sequences of different digests
        share neither drafts nor a draft model's KV.
    """

    __slots__ = (
        "_row_bytes",
        "cache_salt",
        "digest",
        "end",
        "lora_request",
        "mm_features",
        "prompt_embeds",
    )

    def __init__(
        self,
        cache_salt: str | None = None,
        prompt_embeds: bytes = b"",
        num_prompt_tokens: int = 1,
        lora_request: LoRARequest | None = None,
        mm_features: Sequence[MultiModalFeature] = (),
    ) -> None:
        self.lora_request = lora_request
        self.mm_features = mm_features
        self.cache_salt = cache_salt
        self.prompt_embeds = prompt_embeds
        self._row_bytes = len(prompt_embeds) // num_prompt_tokens
        in_first_block = cache_salt is not None or lora_request is not None
        self.end = num_prompt_tokens if prompt_embeds else int(in_first_block)
        if mm_features:
            self.end = max(self.end, mm_features[-1].end)
        keys = self.of_block(0, self.end)
        self.digest = sha256(_encode_keys(keys)).digest() if keys else b""

    @property
    def kinds(self) -> list[str]:
        """What the keys stand for, each once."""
        return list(dict.fromkeys(key.kind for key in self.of_block(0, self.end)))

    def of_block(self, first: int, end: int) -> list[ExtraKey]:
        """Return the keys of the block of tokens [first, end)."""
        keys = []
        lora = self.lora_request
        if first == 0 and lora is not None:
            keys.append(ExtraKey("lora", adapter_key(lora)))
        if first == 0 and self.cache_salt is not None:
            keys.append(ExtraKey("cache_salt", self.cache_salt.encode()))
        if rows := self.prompt_embeds[first * self._row_bytes : end * self._row_bytes]:
            keys.append(ExtraKey("prompt_embeds", sha256(rows).digest()))
        features = self.mm_features
        for index in range(bisect_right(features, first, key=_end_of), len(features)):
            feature = features[index]
            if feature.offset >= end:
                break
            place = struct.pack("<i", feature.offset - first)
            keys.append(ExtraKey("image", feature.mm_hash + place))
        return keys


def adapter_key(lora: LoRARequest) -> bytes:
    """Return the content of an adapter, and its scale unless that is 1."""
    return lora.digest + (b"" if lora.scale == 1.0 else struct.pack("<d", lora.scale))


def _encode_keys(keys: Iterable[ExtraKey]) -> bytes:
    encoded = b""
    for kind, value in keys:
        key = kind.encode() + b":" + value
        encoded += struct.pack("<I", len(key)) + key
    return encoded


NO_EXTRA_KEYS: Final = ExtraKeys()


class GroupKeys:
    """Keys of the blocks of one KV cache group in the prefix index.

    Each group holds other layers, so the same tokens are different content: a key is the block hash
    followed by the group's number. Nothing follows for group 0, so a model with one group is
    looked up by the hashes themselves.
    """

    __slots__ = ("_suffix", "block_size", "number")

    def __init__(self, number: int, block_size: int) -> None:
        self.number = number
        self.block_size = block_size
        self._suffix = bytes([number]) if number else b""

    def key(self, block_hash: bytes) -> bytes:
        return block_hash + self._suffix

    def leading(self, block_hashes: Sequence[bytes], count: int) -> Iterator[bytes]:
        """Return the keys of the first `count` blocks, as far as they have a hash."""
        suffix, hashes = self._suffix, islice(block_hashes, count)
        return (block_hash + suffix for block_hash in hashes) if suffix else hashes


def split_key(key: bytes) -> tuple[bytes, int]:
    """Return (block hash, number of the group) of a key."""
    return key[:HASH_BYTES], key[HASH_BYTES] if len(key) > HASH_BYTES else 0


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
        self._split = struct.Struct(f"{HASH_BYTES}s").iter_unpack

    def digests(self, parent: bytes, blocks: bytes) -> Iterable[bytes]:
        if len(blocks) <= self._short_bytes:
            return self._short(parent, blocks)
        block_bytes = self._block_bytes
        num_blocks = len(blocks) // block_bytes
        written = ctypes.create_string_buffer(num_blocks * HASH_BYTES)
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
        self,
        block_hashes: list[bytes],
        token_ids: Sequence[int],
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        """Append the hashes of the full blocks that `block_hashes` does not cover yet.

        token_ids: [num_tokens], each in [0, 2^32).
        extra_keys: the same for all calls of a request.
        """
        size = self.block_size
        start = len(block_hashes) * size
        end = len(token_ids) // size * size
        if start >= end:
            return
        blocks = struct.pack(f"<{end - start}I", *token_ids[start:end])
        parent = block_hashes[-1] if block_hashes else self.root
        done = 0
        while start < end and (start == 0 or start < extra_keys.end):
            content = blocks[done : done + self._block_bytes]
            keys = _encode_keys(extra_keys.of_block(start, start + size))
            parent = sha256(parent + content + keys).digest()
            block_hashes.append(parent)
            start += size
            done += self._block_bytes
        block_hashes.extend(self._digests(parent, blocks[done:]))
