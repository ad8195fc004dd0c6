"""A media reader without images: it reads nothing of a URL, and puts no pixels anywhere."""

import hashlib
from collections.abc import Sequence

from api_server.media.reader import ImageSource, LoadedImage
from proto.errors import InvalidRequestError
from proto.messages.multimodal import SharedPixels


class FakeLease:
    def __init__(self, reader: "FakeMediaReader") -> None:
        self._reader = reader
        self._is_held = True
        reader.num_leases += 1

    def release(self) -> None:
        assert self._is_held, "a lease is released once"
        self._is_held = False
        self._reader.num_leases -= 1


class FakeMediaReader:
    """Loads an image for any URL, with as many rows as its last digit says, else three.

    calls: sources, tenant and salt of each call. num_leases: that are held. num_forgotten: calls of
    `forget_unused`. A URL that contains
    "bad" is refused, and so is a uuid that no image of the same tenant and salt had.
    """

    def __init__(self, placeholder: str = "<image>") -> None:
        self.placeholder = placeholder
        self.image_token = "<image>"
        self.calls: list[tuple[list[ImageSource], int, str | None]] = []
        self.num_leases = 0
        self.is_closed = False
        self.num_forgotten = 0
        self._known: dict[tuple[int, str | None, str], str] = {}

    @property
    def sources(self) -> list[ImageSource]:
        """The sources of the last call."""
        return self.calls[-1][0]

    async def read(
        self, sources: Sequence[ImageSource], tenant: int, salt: str | None
    ) -> list[LoadedImage]:
        self.calls.append((list(sources), tenant, salt))
        urls = [self._url(source, tenant, salt) for source in sources]
        return [
            self._image(url, source, tenant, salt)
            for url, source in zip(urls, sources, strict=True)
        ]

    def _url(self, source: ImageSource, tenant: int, salt: str | None) -> str:
        url = source.url
        if url is None:
            url = self._known.get((tenant, salt, source.uuid or ""))
            if url is None:
                raise InvalidRequestError(f"{source.param}: no image is kept here", source.param)
        elif source.uuid is not None:
            self._known[tenant, salt, source.uuid] = url
        if "bad" in url:
            raise InvalidRequestError(f"{source.param}: no image can be read", source.param)
        return url

    def _image(self, url: str, source: ImageSource, tenant: int, salt: str | None) -> LoadedImage:
        number = int(url[-1]) if url[-1].isdecimal() else 3
        digest = hashlib.sha256(repr((url, source.detail, tenant, salt)).encode()).digest()
        return LoadedImage(
            mm_hash=digest,
            pixels=SharedPixels(digest.hex(), (1, 3, 2, 2 * number)),
            grid=(1, number),
            num_embeds=number,
            expansion=f"<around>{'<image>' * number}<around>",
            lease=FakeLease(self),
        )

    def warm_up(self) -> None: ...

    def forget_unused(self) -> None:
        self.num_forgotten += 1

    async def close(self) -> None:
        self.is_closed = True
