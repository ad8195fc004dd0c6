"""What the KV of a block depends on besides tokens, and who may find it.

    cache_salt   separates clients from each other
    adapter      name of the adapter that the request is computed with
    media        images and the like, whose placeholder tokens all look alike

Salt and adapter enter the first block and through the chain all others; a medium
enters the blocks that it overlaps.
"""

import struct
from dataclasses import dataclass
from typing import Final

_SALT_TAG: Final = b"cache_salt:"
_ADAPTER_TAG: Final = b"adapter:"
_MEDIA_TAG: Final = b"media:"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A medium at the positions [start, end) of a request.

    content_hash: of what it shows, the same in every process.
    """

    content_hash: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """All extra keys of one request. media: in the order of their positions."""

    cache_salt: str | None = None
    adapter: str | None = None
    media: tuple[MediaItem, ...] = ()

    def of_block(self, start: int, end: int) -> bytes:
        """The bytes that enter the hash of the block with the positions [start, end).

        Each key is tagged with its kind, so that a salt never equals an adapter. A
        medium comes with its offset in the block: the same picture one token further
        on is other KV.
        """
        keys = b""
        if start == 0 and self.cache_salt is not None:
            keys += _with_length(_SALT_TAG + self.cache_salt.encode())
        if start == 0 and self.adapter is not None:
            keys += _with_length(_ADAPTER_TAG + self.adapter.encode())
        for item in self.media:
            if item.start < end and start < item.end:
                offset = struct.pack("<q", item.start - start)
                keys += _with_length(_MEDIA_TAG + offset + item.content_hash)
        return keys


NO_EXTRA_KEYS: Final = ExtraKeys()


def _with_length(key: bytes) -> bytes:
    return struct.pack("<I", len(key)) + key
