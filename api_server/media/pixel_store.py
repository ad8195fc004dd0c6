"""Pixels of images in shared memory, and who uses them.

    request ── lease ──▶ StoredImage ── file ──▶ /dev/shm/tokend-…/0.0.17   read by the workers

The front end owns the files that its media process has written. An image that no request has
leased stays until others need its memory, least recently used first, so that the same image again,
in the next turn of a conversation, is neither decoded nor written.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import stat
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from proto.errors import ModelError, OverloadedError
from proto.messages.multimodal import SharedPixels

logger = logging.getLogger("tokend.api")

MAX_UUIDS: Final = 16
"""Names by which clients can find one image; the oldest is forgotten first."""
_numbers: Final = itertools.count()


class UuidKey(NamedTuple):
    """A client's name of an image, by which only its tenant finds it, with the same salt.

    It is found with any detail, as it was sent.
    """

    tenant: int
    salt: str | None
    uuid: str


@dataclass(eq=False)
class StoredImage:
    """An image whose pixels are in a file.

    Fields as in `LoadedImage`. num_leases: of requests that have not ended. uri_digest: of the data
    URI that had it last; empty for none.
    """

    mm_hash: bytes
    pixels: SharedPixels
    grid: tuple[int, ...]
    num_embeds: int
    expansion: str
    num_bytes: int
    num_leases: int = 0
    uri_digest: bytes = b""
    uuids: OrderedDict[UuidKey, None] = field(default_factory=OrderedDict)


class MediaLease:
    """Keeps the pixels of an image while a request may need them."""

    def __init__(self, store: "PixelStore", image: StoredImage) -> None:
        self._store = store
        self._image: StoredImage | None = image

    def release(self) -> None:
        """End the lease; a second call has no effect."""
        image, self._image = self._image, None
        if image is not None:
            self._store.release_image(image)


class PixelStore:
    """The images of one model in a front end.

    folder: for pixels; made when it is needed. owner: first part of the names of files, the index
    and the incarnation of the front end. max_bytes: of all images together;
    `make_folder` lowers it to half of the memory that the folder is in.
    """

    def __init__(self, folder: str, owner: str, max_bytes: int) -> None:
        self.folder = folder
        self._owner = owner
        self._max_bytes = max_bytes
        self._images: OrderedDict[bytes, StoredImage] = OrderedDict()  # least recently used first
        self._by_uuid: dict[UuidKey, StoredImage] = {}
        self._by_uri: dict[bytes, StoredImage] = {}
        self._num_bytes = 0
        self._reserved_bytes = 0
        self._is_closed = False
        self._released = asyncio.Event()  # since the last image found no space

    @property
    def max_bytes(self) -> int:
        """Most bytes of all pixels."""
        return self._max_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all pixels."""
        return self._num_bytes

    def make_folder(self) -> None:
        """Create the folder for pixels, unless another front end has; raises ModelError.

        Its name is known to other users of the machine, so one of another owner is refused.
        """
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
            status = os.lstat(self.folder)
            memory = os.statvfs(self.folder)
        except OSError as error:
            raise ModelError(f"no folder for pixels of images: {error}") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ModelError(f"{self.folder}, for pixels of images, belongs to another user")
        total = memory.f_blocks * memory.f_frsize
        if 0 < total < 2 * self._max_bytes:  # 0 for a file system without a limit
            self._max_bytes = total // 2
            logger.warning(
                "pixels of images take at most %d bytes, half of the memory at %s "
                "(--media-memory is more)",
                self._max_bytes,
                os.path.dirname(self.folder),
            )

    def new_name(self) -> str:
        """Return the name of a file that does not exist."""
        return f"{self._owner}.{next(_numbers)}"

    def remove_file(self, name: str) -> None:
        """Remove the file of an image that has not been added."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, name))

    def find_image(self, mm_hash: bytes) -> StoredImage | None:
        """Return an image, which is then the last to be evicted."""
        image = self._images.get(mm_hash)
        if image is not None:
            self._images.move_to_end(mm_hash)
        return image

    def find_uuid(self, key: UuidKey) -> StoredImage | None:
        """Return the image that a client has given this name."""
        image = self._by_uuid.get(key)
        return None if image is None else self.find_image(image.mm_hash)

    def find_uri(self, uri_digest: bytes) -> StoredImage | None:
        """Return the image of a data URI with this digest."""
        image = self._by_uri.get(uri_digest)
        return None if image is None else self.find_image(image.mm_hash)

    def name_uri(self, uri_digest: bytes, image: StoredImage) -> None:
        """Have `find_uri` find the image, if it is kept, by the last data URI that had it."""
        if self._images.get(image.mm_hash) is image:
            self._by_uri.pop(image.uri_digest, None)
            self._by_uri[uri_digest] = image
            image.uri_digest = uri_digest

    def name_image(self, key: UuidKey, image: StoredImage) -> None:
        """Have `find_uuid` find the image from now on."""
        if (before := self._by_uuid.get(key)) is not None:
            before.uuids.pop(key)
        self._by_uuid[key] = image
        image.uuids[key] = None
        if len(image.uuids) > MAX_UUIDS:
            del self._by_uuid[image.uuids.popitem(last=False)[0]]

    def add_image(self, image: StoredImage) -> bool:
        """Take over an image and its file, and evict others for it; False if there is no space.

        Raises OverloadedError after `close`, since no request may lease it.
        """
        assert image.mm_hash not in self._images, "the image is stored already"
        if self._is_closed:
            raise OverloadedError("images are no longer read for this model")
        if not self._has_space(image.num_bytes):
            return False
        self._images[image.mm_hash] = image
        self._num_bytes += image.num_bytes
        return True

    async def reserve_space(self, num_bytes: int) -> None:
        """Wait until leases end and there is space that `add_image` gives to no other image.

        The caller limits the time, and calls `release_space`. One call at a time.
        """
        assert num_bytes <= self._max_bytes, "there can never be space"
        while not self._has_space(num_bytes):
            self._released.clear()
            await self._released.wait()
        self._reserved_bytes += num_bytes

    def release_space(self, num_bytes: int) -> None:
        """End a reservation."""
        self._reserved_bytes -= num_bytes
        self._released.set()

    def _has_space(self, num_bytes: int) -> bool:
        space = self._max_bytes - self._reserved_bytes - num_bytes
        self._evict_down_to(space)
        return self._num_bytes <= space

    def lease_image(self, image: StoredImage) -> MediaLease:
        image.num_leases += 1
        return MediaLease(self, image)

    def release_image(self, image: StoredImage) -> None:
        assert image.num_leases > 0, "the image is not leased"
        image.num_leases -= 1
        self._evict_down_to(0 if self._is_closed else self._max_bytes)
        self._released.set()

    def evict_unleased(self) -> None:
        """Remove all images without leases."""
        self._evict_down_to(0)

    def close(self) -> None:
        """Remove all images, leased ones when their requests end."""
        self._is_closed = True
        self._evict_down_to(0)

    def _evict_down_to(self, num_bytes: int) -> None:
        """Remove images without leases until at most this many bytes are left, if possible."""
        if self._num_bytes <= num_bytes:
            return
        for image in [image for image in self._images.values() if not image.num_leases]:
            del self._images[image.mm_hash]
            self._by_uri.pop(image.uri_digest, None)
            for key in image.uuids:
                del self._by_uuid[key]
            self._num_bytes -= image.num_bytes
            self.remove_file(image.pixels.name)
            if self._num_bytes <= num_bytes:
                return
