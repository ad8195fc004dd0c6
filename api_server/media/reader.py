"""Images of requests as pixels in shared memory: `MediaReader`.

ImageSource ─▶ encoded bytes ─▶ digest ─▶ kept? ─ yes ──────────────────┬─▶ LoadedImage
               (sources.py)              └─ no ─▶ decode, make pixels ──┘
                                                  (processing.py)

A data URI that has been read before is found by the digest of its text, without decoding it.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from api_server.media.pixel_store import MediaLease, PixelStore, StoredImage, UuidKey
from api_server.media.placeholders import TILED, Placeholders, processor_settings, read_placeholders
from api_server.media.processing import MediaProcess, NoSpaceError
from api_server.media.sources import INLINE_CHARACTERS, ImageSources
from api_server.turns import Turns
from proto.errors import (
    InternalRequestError,
    InvalidRequestError,
    OverloadedError,
    TimeLimitError,
)
from proto.messages.multimodal import SharedPixels
from proto.messages.prepared_model import PreparedModel
from proto.runtime.run_directory import pixels_folder
from proto.settings.config import MediaConfig

HELD_IMAGES: Final = 4
"""Times --max-image-bytes, the bytes of images that are held which are in no body: each counts from
before it is fetched or read from a file until it is processed."""
WAIT_SECONDS: Final = 30.0
"""Time that an image waits for those of other requests to be processed."""
SPACE_SECONDS: Final = 20.0
"""Time that an image then waits for requests to end whose images take all memory."""
HASHED_CHARACTERS: Final = 1 << 16
"""Characters of a data URI that are encoded at once: no copy of all of it is made."""
QUEUE_SECONDS: Final = WAIT_SECONDS + SPACE_SECONDS
"""Time that all images of a request may wait for others."""


@dataclass(frozen=True)
class ImageSource:
    """An image as a request has it.

    url: a data URI, or a URL of http, https or file; None for an image that is known by its uuid.
    uuid: the client's name for it; with a URL it is the name from now on. detail: "low", "high" or
    "auto". param: where it is in the request, for errors.
    """

    url: str | None
    uuid: str | None
    detail: str
    param: str


@dataclass(frozen=True)
class LoadedImage:
    """An image whose pixels the workers can read.

    mm_hash, pixels, grid, num_embeds: as in MultiModalFeature. expansion: text that replaces the
    placeholder in the prompt. lease: to be released when the request ends.
    """

    mm_hash: bytes
    pixels: SharedPixels
    grid: tuple[int, ...]
    num_embeds: int
    expansion: str
    lease: MediaLease


class MediaReader:
    """Reads the images of requests for one model.

    placeholders: how they stand in its prompts. settings: bytes that differ whenever the same image
    has other pixels. has_detail: whether detail "low" differs from the others.
    """

    def __init__(
        self,
        config: MediaConfig,
        placeholders: Placeholders,
        process: MediaProcess,
        store: PixelStore,
        sources: ImageSources,
        settings: bytes,
        has_detail: bool,
    ) -> None:
        self._config = config
        self._placeholders = placeholders
        self._process = process
        self._store = store
        self._sources = sources
        self._has_detail = has_detail
        self._settings = hashlib.sha256(settings).digest()
        self._turns = Turns(1)
        self._space_turns = Turns(1)
        self._held_bytes = Turns(HELD_IMAGES * config.max_image_bytes)
        self._running: dict[bytes, asyncio.Task[None]] = {}  # images that are processed now

    @classmethod
    def create(
        cls,
        model: PreparedModel,
        config: MediaConfig,
        run_dir: str,
        owner: str,
        token_text: Callable[[int], str],
    ) -> "MediaReader":
        """Return the reader of a model that has a vision part; raises ModelError.

        owner: index and incarnation of the front end with a dot between them. token_text: text of a
        token id.
        """
        assert model.vision is not None
        architecture = model.vision.architecture
        store = PixelStore(pixels_folder(run_dir), owner, config.media_memory)
        store.make_folder()
        process = MediaProcess(
            store.folder,
            model.folder,
            architecture,
            config.max_image_pixels,
            store.max_bytes,
            config.media_timeout,
        )
        remote = None
        if config.allowed_media_domains:
            from api_server.media.remote import RemoteImages  # needs packages of its own

            remote = RemoteImages(
                config.allowed_media_domains, config.max_image_bytes, config.media_timeout
            )
        settings = [architecture, processor_settings(model.folder)]
        return cls(
            config,
            read_placeholders(model, token_text),
            process,
            store,
            ImageSources(config, remote),
            json.dumps(settings, sort_keys=True).encode(),
            architecture in TILED,
        )

    @property
    def placeholder(self) -> str:
        """Text that the chat template writes for an image."""
        return self._placeholders.placeholder

    @property
    def image_token(self) -> str:
        """Text of the token whose embedding is replaced by a row of encoder output."""
        return self._placeholders.image_token

    @property
    def num_bytes(self) -> int:
        """Bytes of all pixels that are kept."""
        return self._store.num_bytes

    def warm_up(self) -> None:
        """Start the process for images now, so that the first one need not wait for it."""
        self._process.warm_up()

    def forget_unused(self) -> None:
        """Drop the pixels of images that no request uses."""
        self._store.evict_unleased()

    async def close(self) -> None:
        """End the process; pixels go with the last request that uses them."""
        self._store.close()
        await self._process.close()

    async def read(
        self, sources: Sequence[ImageSource], tenant: int, salt: str | None
    ) -> list[LoadedImage]:
        """Return the images of a request, in order.

        tenant, salt: others cannot find these images by their content or uuid. Raises
        InvalidRequestError, OverloadedError, TimeLimitError or InternalRequestError, whose message
        begins with the `param` of the image at fault, and ClientDisconnect.
        """
        limit = self._config.max_images
        if len(sources) > limit:
            param = sources[limit].param
            raise InvalidRequestError(
                f"{param}: a prompt has at most {limit} images (--limit-mm-per-prompt), got "
                f"{len(sources)}",
                param,
            )
        seconds = QUEUE_SECONDS + self._config.media_timeout * (1 + len(sources) / 4)
        loaded: list[LoadedImage] = []
        with ExitStack() as undo:
            try:
                async with asyncio.timeout(seconds):
                    for source in sources:
                        image = await self._load_named(source, tenant, salt, loaded)
                        undo.callback(image.lease.release)
                        loaded.append(image)
            except TimeoutError:
                param = sources[len(loaded)].param
                raise TimeLimitError(
                    f"{param}: the images of the request were not read within {seconds:g} s "
                    "(--media-timeout)",
                    param,
                ) from None
            undo.pop_all()
        return loaded

    async def _load_named(
        self, source: ImageSource, tenant: int, salt: str | None, loaded: Sequence[LoadedImage]
    ) -> LoadedImage:
        """Return an image with a lease; errors begin with its `param`.

        loaded: images that the request has already.
        """
        own_bytes = {each.mm_hash: 4 * math.prod(each.pixels.shape) for each in loaded}
        try:
            image = await self._load(source, tenant, salt, sum(own_bytes.values()))
        except (InvalidRequestError, OverloadedError, InternalRequestError) as error:
            message = f"{source.param}: {error.message}"
            raise type(error)(message, source.param) from None
        return LoadedImage(
            image.mm_hash,
            image.pixels,
            image.grid,
            image.num_embeds,
            image.expansion,
            self._store.lease_image(image),
        )

    async def _load(
        self, source: ImageSource, tenant: int, salt: str | None, own_bytes: int
    ) -> StoredImage:
        """Return an image, which has to be leased before others run.

        own_bytes: pixels of the images that the request has already.
        """
        detail = "low" if self._has_detail and source.detail == "low" else ""
        key = None if source.uuid is None else UuidKey(tenant, salt, source.uuid)
        if source.url is None:
            image = None if key is None else self._store.find_uuid(key)
            if image is None:
                raise InvalidRequestError("no image is kept under this uuid: send it once more")
            return image
        url, mm_hash, uri_digest, held = source.url, None, b"", self._config.max_image_bytes
        if url[:5].lower() == "data:":
            held = 0
            uri_digest = await self._digest(url, detail, tenant, salt)
            image = self._store.find_uri(uri_digest)
            if image is not None:
                if key is not None:
                    self._store.name_image(key, image)
                return image
        else:
            await self._held_bytes.take(held)
        try:
            encoded = await self._sources.read(url)
            if held:
                self._held_bytes.give_back(held - len(encoded))
                held = len(encoded)
            mm_hash = await self._digest(encoded, detail, tenant, salt)
            image = await self._find_or_process(mm_hash, encoded, detail, own_bytes)
        finally:
            running = None if mm_hash is None else self._running.get(mm_hash)
            if running is None:
                self._held_bytes.give_back(held)
            else:  # the request has ended before its image
                running.add_done_callback(lambda _: self._held_bytes.give_back(held))
        if uri_digest:
            self._store.name_uri(uri_digest, image)
        if key is not None:
            self._store.name_image(key, image)
        return image

    async def _digest(
        self, content: bytes | str, detail: str, tenant: int, salt: str | None
    ) -> bytes:
        """Return the mm_hash of an encoded image, or the digest of a data URI.

        Lengths stand before texts, so that no two lists of parts have the same bytes.
        """
        salted = "" if salt is None else f"{len(salt)}:{salt}"
        head = f"{tenant},{detail},{salted},{len(content)}:"
        digest = hashlib.sha256(self._settings)
        digest.update(head.encode(errors="surrogatepass"))
        if len(content) <= INLINE_CHARACTERS:
            _update(digest, content)
        else:
            await asyncio.to_thread(_update, digest, content)
        return digest.digest()

    async def _find_or_process(
        self, mm_hash: bytes, encoded: bytes, detail: str, own_bytes: int
    ) -> StoredImage:
        """Return an image, which is processed only once if several requests have it.

        The task belongs to the request that comes first, but does not end with it; the others try
        by themselves if it fails.
        """
        while True:
            image = self._store.find_image(mm_hash)
            if image is not None:
                return image
            running = self._running.get(mm_hash)
            if running is not None:
                await asyncio.wait({running})
                continue
            task = asyncio.create_task(self._process_image(mm_hash, encoded, detail, own_bytes))
            self._running[mm_hash] = task
            task.add_done_callback(lambda done: self._note_end(mm_hash, done))
            await asyncio.shield(task)

    def _note_end(self, mm_hash: bytes, task: asyncio.Task[None]) -> None:
        del self._running[mm_hash]
        if not task.cancelled():
            task.exception()  # else asyncio would log that it was never retrieved

    async def _process_image(
        self, mm_hash: bytes, encoded: bytes, detail: str, own_bytes: int
    ) -> None:
        """Put an image into the store.

        How much space it needs is known when it has been processed. If there is none, its pixels
        are dropped and made again when there is, so that those of waiting images take no memory and
        other images are processed meanwhile.
        """
        reserved = 0
        try:
            while True:
                async with self._turn():
                    image = await self._make_pixels(mm_hash, encoded, detail)
                    self._store.release_space(reserved)
                    reserved = 0
                    if self._add_image(image, own_bytes):
                        return
                await self._reserve_space(image.num_bytes)
                reserved = image.num_bytes
        finally:
            self._store.release_space(reserved)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Have the process for images within a block."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turns.take()
        except TimeoutError:
            raise OverloadedError("other images keep the image processor busy") from None
        try:
            yield
        finally:
            self._turns.give_back()

    async def _make_pixels(self, mm_hash: bytes, encoded: bytes, detail: str) -> StoredImage:
        """Return an image whose pixels are in a file."""
        name = self._store.new_name()
        try:
            try:
                done = await self._process.process(encoded, name, detail)
            except NoSpaceError:
                self._store.evict_unleased()  # others may use the same memory
                done = await self._process.process(encoded, name, detail)
            expansion = self._placeholders.expand(done.shape, done.grid)
        except BaseException:
            self._store.remove_file(name)
            raise
        return StoredImage(
            mm_hash,
            SharedPixels(name, done.shape),
            done.grid,
            expansion.num_embeds,
            expansion.text,
            4 * math.prod(done.shape),
        )

    def _add_image(self, image: StoredImage, own_bytes: int) -> bool:
        """Add an image to the store, or remove its file if there is no space.

        Raises InvalidRequestError if there can never be enough for all images of the request.
        """
        limit, needed = self._store.max_bytes, own_bytes + image.num_bytes
        is_added = False
        try:
            is_added = needed <= limit and self._store.add_image(image)
        finally:
            if not is_added:
                self._store.remove_file(image.pixels.name)
        if is_added:
            return True
        if needed > limit:
            raise InvalidRequestError(
                f"the pixels of the images up to this one take {needed} bytes, more than the limit "
                f"of {limit} (--media-memory)"
            )
        return False

    async def _reserve_space(self, num_bytes: int) -> None:
        try:
            async with asyncio.timeout(SPACE_SECONDS):
                await self._space_turns.take()
                try:
                    await self._store.reserve_space(num_bytes)
                finally:
                    self._space_turns.give_back()
        except TimeoutError:
            raise OverloadedError(
                "images of other requests take all memory for them (--media-memory)"
            ) from None


def _update(digest: "hashlib._Hash", content: bytes | str) -> None:
    if isinstance(content, bytes):
        digest.update(content)
        return
    for start in range(0, len(content), HASHED_CHARACTERS):
        piece = content[start : start + HASHED_CHARACTERS]
        digest.update(piece.encode(errors="surrogatepass"))
