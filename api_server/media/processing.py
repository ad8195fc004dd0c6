"""Processing of images within limits of time and memory, in another process.

`media_process.py` says what is limited there. The process stays between images. It starts with the
first one, or when the front end of a model that reads images starts, and again after its end.
"""

import asyncio
import os
import signal
from typing import Final

from api_server.media.media_process import MAX_FRAME, MODULE, ImageDone, ImageTask
from api_server.task_process import EXIT_SECONDS, TaskProcess
from proto.codec import MessageDecoder, encode
from proto.errors import InternalRequestError, InvalidRequestError, OverloadedError

START_SECONDS: Final = 60.0
"""Time limit of a start, which imports Pillow and transformers; a second on an idle machine."""
_DECODER: Final[MessageDecoder[ImageDone]] = MessageDecoder(ImageDone)
_OWN_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
"""Signals by which a process ends that an image has misled."""


class NoSpaceError(OverloadedError):
    """There is no memory for the pixels of an image."""


class MediaProcess:
    """The front end's side of the process for images.

    pixels_folder: where it writes. model_folder, architecture: as in `ImageProcessor.load`.
    max_bytes: of the pixels of an image. seconds: for an image.
    """

    def __init__(
        self,
        pixels_folder: str,
        model_folder: str,
        architecture: str,
        max_pixels: int,
        max_bytes: int,
        seconds: float,
    ) -> None:
        arguments = (pixels_folder, str(max_pixels), str(max_bytes), model_folder, architecture)
        self._child = TaskProcess(MODULE, MAX_FRAME, arguments)
        self._seconds = seconds
        self._starting: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()  # while an image is processed
        self._is_closed = False

    def warm_up(self) -> None:
        """Start the process, if none runs, without waiting for it; not after `close`."""
        if self._is_closed:
            return
        if self._starting is None or (self._starting.done() and self._child.has_ended):
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_retrieve_error)

    async def process(self, encoded: bytes, name: str, detail: str) -> ImageDone:
        """Return shape and grid of the pixels, which are in the file of this name.

        Only one call at a time. Raises InvalidRequestError for an image that cannot be used,
        NoSpaceError or another OverloadedError if the machine has no memory or no process, and
        InternalRequestError if the model's settings are wrong.
        """
        async with self._busy:
            await self._wait_until_started()
            done = await self._do_task(encoded, name, detail)
        if done.error:
            raise _error(done)
        return done

    async def close(self) -> None:
        """End the process; the image that it processes and later ones get OverloadedError."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        self._child.kill()
        async with self._busy:
            await self._child.end(EXIT_SECONDS)

    async def _wait_until_started(self) -> None:
        self.warm_up()
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._is_closed or self._starting is None:
            raise OverloadedError("images are no longer read for this model")
        try:
            self._starting.result()
        except (OSError, EOFError):  # TimeoutError is one of the former
            raise OverloadedError("there is no process for images") from None

    async def _start(self) -> None:
        """Start the process and wait until it is ready.

        Raises OSError, EOFError or TimeoutError if it does not become ready, InternalRequestError
        for settings of the model that it cannot use.
        """
        await self._child.end(EXIT_SECONDS)
        self._child.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                done = _DECODER.decode(await self._child.receive())
        except BaseException:
            await self._child.end(EXIT_SECONDS)
            raise
        if done.error:
            await self._child.end(EXIT_SECONDS)
            raise InternalRequestError(f"images cannot be processed: {done.error}")

    async def _do_task(self, encoded: bytes, name: str, detail: str) -> ImageDone:
        """Have an image processed; ends the process that fails, and starts the next one."""
        task = ImageTask(len(encoded), name, detail, self._seconds + 1.0)
        try:
            async with asyncio.timeout(self._seconds):
                await self._child.write_file(encoded)
                done = _DECODER.decode(await self._child.do_task(encode(task)))
        except TimeoutError:
            await self._replace()
            raise InvalidRequestError(
                f"processing the image takes longer than {self._seconds:g} s"
            ) from None
        except (OSError, EOFError):
            status = await self._replace()
            if self._is_closed:
                raise OverloadedError("images are no longer read for this model") from None
            if status in [-number for number in _OWN_FAULTS]:
                raise InvalidRequestError("the image cannot be processed") from None
            if status == -signal.SIGPROF:
                raise InvalidRequestError("processing the image takes too long") from None
            raise OverloadedError("the process for images has ended") from None
        except BaseException:
            await self._child.end(EXIT_SECONDS)
            raise
        if done.is_last:
            await self._replace()
        else:
            os.ftruncate(self._child.file, 0)
        return done

    async def _replace(self) -> int | None:
        """End the process, start the next one, and return the exit status."""
        status = await self._child.end(EXIT_SECONDS)
        if not self._is_closed:
            self.warm_up()
        return status


def _error(done: ImageDone) -> InvalidRequestError | OverloadedError:
    if done.kind == "host":
        return NoSpaceError(done.error)
    return InvalidRequestError(done.error)


def _retrieve_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # else asyncio would log that it was never retrieved
