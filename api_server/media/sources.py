"""Encoded images from where a request says: data URIs, http and https URLs, local files."""

import asyncio
import binascii
import os
import stat
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from proto.errors import InvalidRequestError, shown
from proto.settings.config import MediaConfig

if TYPE_CHECKING:
    from api_server.media.remote import RemoteImages

INLINE_CHARACTERS: Final = 1 << 16
"""Longest data URI that is decoded on the event loop."""
_BASE64: Final = ";base64"


class ImageSources:
    """Reads encoded images within the limits of the settings.

    remote: fetches from the allowed hosts; None if there are none.
    """

    def __init__(self, config: MediaConfig, remote: "RemoteImages | None" = None) -> None:
        self._max_bytes = config.max_image_bytes
        self._seconds = config.media_timeout
        self._root = config.allowed_local_media_path
        self._remote = remote

    async def read(self, url: str) -> bytes:
        """Return the bytes of an image; raises InvalidRequestError."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            if len(url) <= INLINE_CHARACTERS:
                return self._decode(url)
            return await asyncio.to_thread(self._decode, url)
        if scheme in ("http", "https"):
            if self._remote is None:
                raise InvalidRequestError(
                    "images are not loaded from URLs here: send a data URI, or have the operator "
                    "allow the host (--allowed-media-domains)"
                )
            return await self._remote.fetch(url)
        if scheme == "file":
            return await self._read_file(url)
        raise InvalidRequestError(
            f"an image is a data URI or a URL of http or https, got {shown(url)}"
        )

    def _decode(self, url: str) -> bytes:
        header, comma, body = url.partition(",")
        if not comma or not header.lower().endswith(_BASE64):
            raise InvalidRequestError(
                "the data URI of an image has the form data:image/png;base64,…"
            )
        if len(body) // 4 * 3 > self._max_bytes + 2:
            raise too_large(self._max_bytes)
        try:
            content = binascii.a2b_base64(body, strict_mode=True)
        except ValueError:
            raise InvalidRequestError("the data URI of the image is not base64") from None
        if len(content) > self._max_bytes:
            raise too_large(self._max_bytes)
        return content

    async def _read_file(self, url: str) -> bytes:
        if self._root is None:
            raise InvalidRequestError(
                "images are not loaded from files here (--allowed-local-media-path)"
            )
        try:
            async with asyncio.timeout(self._seconds):  # a file system may not answer
                return await asyncio.to_thread(self._read_below, self._root, url)
        except TimeoutError:
            raise InvalidRequestError("the file of the image could not be read") from None

    def _read_below(self, root: str, url: str) -> bytes:
        """Return the content of a file below a folder.

        What a path means may change between a check and the opening, so the file that was opened is
        checked, too. A FIFO would wait for its writer; a device might never end.
        """
        try:
            path = os.path.realpath(unquote(urlsplit(url).path))
            if not _is_below(path, root):
                raise InvalidRequestError(
                    "the file of the image is not below --allowed-local-media-path"
                )
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise InvalidRequestError("the file of the image is no regular file")
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                opened = os.readlink(f"/proc/self/fd/{descriptor}")
                if not _is_below(opened, root) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise FileNotFoundError
                content = file.read(self._max_bytes + 1)
        except (OSError, ValueError):
            raise InvalidRequestError("the file of the image cannot be read") from None
        if len(content) > self._max_bytes:
            raise too_large(self._max_bytes)
        return content


def too_large(max_bytes: int) -> InvalidRequestError:
    """Return the error for an image of too many bytes."""
    return InvalidRequestError(f"the image has more than {max_bytes} bytes (--max-image-bytes)")


def _is_below(path: str, folder: str) -> bool:
    """Return whether a path without links is below a folder."""
    root = os.path.realpath(folder)
    return path.startswith(root if root.endswith("/") else root + "/")
