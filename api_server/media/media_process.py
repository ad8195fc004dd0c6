"""The process in which a front end has images decoded and made into pixels.

    front end      ── ImageTask ──▶  python -m api_server.media.media_process
    (processing)   ◀── ImageDone ──  (one task after the other, until its input ends)
        │  └── encoded image ──┘ │
        │  a file in memory of both
        │                        ▼
        └── owns ──▶ pixels in a file in the folder for pixels ──▶ workers

Images come from clients, and decoders of images have had many faults, so none runs in the front
end. Each task has a limit of memory, in proportion to the image, and one of processor time; the
front end kills a process that takes longer (`processing.py`). Before the first task it limits
itself for good (`confine_process`). Errors have no text of the libraries,
which may tell addresses of memory.
"""

import contextlib
import os
import socket
import sys
from typing import Final, Literal

from proto.codec import Message, MessageDecoder, encode
from proto.errors import ModelError
from proto.runtime.host_resources import confine_process, process_limits

MODULE: Final = "api_server.media.media_process"
HEADER_MEMORY: Final = 64 << 20
"""Bytes that reading a header may take, beside a few times those of the encoded image."""
WEBP_MEMORY: Final = 12
"""Further bytes for each pixel of a WebP image: its decoder has two canvases of 4 bytes."""
MIN_MEMORY: Final = 512 << 20
"""Bytes that any image may take: the pixels of 17 tiles, several times, while they are computed."""
PIXEL_MEMORY: Final = 32
"""Further bytes for each pixel: copies of the image in several formats."""
GRID_MEMORY: Final = 48
"""Further bytes for each pixel of a grid of patches: float32 of two frames, twice."""
OTHER_MEMORY: Final = 256 << 20
"""Further bytes that the process may grow by in its life."""
MAX_FILES: Final = 64
MAX_FRAME: Final = 1 << 12


class ImageTask(Message, array_like=True, frozen=True):
    """An image to process.

    num_bytes: length of the encoded image in the file. name: of the file for its pixels. detail: as
    in `ImageProcessor.process`. seconds: of processor time.
    """

    num_bytes: int
    name: str
    detail: str
    seconds: float


class ImageDone(Message, array_like=True, frozen=True):
    """That the pixels are in their file, or why they are not. Also sent when the process is ready.

    shape: of the pixels. grid: as in MultiModalFeature. error: message; empty for none. kind: fault
    of the image, of the model's settings, or of the host, which has no memory for the pixels.
    is_last: whether the process ends now.
    """

    shape: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    error: str = ""
    kind: Literal["image", "model", "host"] = "image"
    is_last: bool = False


class MediaServer:
    """Processes the tasks of a socket, whose encoded images are in a file.

    folder: for pixels. max_pixels: of an image as it is sent. max_bytes: of the pixels made of it.
    """

    def __init__(
        self, channel: socket.socket, file: int, folder: str, max_pixels: int, max_bytes: int
    ) -> None:
        self._channel = channel
        self._file = file
        self._folder = folder
        self._max_pixels = max_pixels
        self._max_bytes = max_bytes
        self._decoder: MessageDecoder[ImageTask] = MessageDecoder(ImageTask)

    def run(self, model_folder: str, architecture: str) -> None:
        """Process images until the front end closes its end, or one has used up the memory.

        After a failed allocation the process may be inconsistent, so it ends.
        """
        from api_server.media.image_processors import ImageProcessor, hide_torch, load_decoders

        hide_torch()
        load_decoders()
        try:
            self._processor = ImageProcessor.load(model_folder, architecture)
        except ModelError as error:
            self._channel.send(encode(ImageDone(error=str(error)[: MAX_FRAME // 8], kind="model")))
            return
        most = self._memory(self._max_pixels) + OTHER_MEMORY
        confine_process(most, self._max_bytes, MAX_FILES)
        self._channel.send(encode(ImageDone()))
        done = ImageDone()
        while not done.is_last and (frame := self._channel.recv(MAX_FRAME)):
            task = self._decoder.decode(frame)
            try:
                done = self._process(task)
            except MemoryError:
                done = ImageDone(error="the image takes too much memory", is_last=True)
            try:
                self._channel.send(encode(done))
            except ConnectionError:  # the front end has gone, and with it the owner of the file
                self._remove(task.name)
                raise

    def _memory(self, num_pixels: int) -> int:
        """Return the bytes that an image of this many pixels may take."""
        in_grid = min(num_pixels, self._processor.most_grid_pixels)
        return MIN_MEMORY + PIXEL_MEMORY * num_pixels + GRID_MEMORY * in_grid

    def _process(self, task: ImageTask) -> ImageDone:
        from api_server.media.image_processors import (
            ImageError,
            decode,
            open_image,
            webp_pixels,
        )

        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            encoded = file.read(task.num_bytes)
        try:
            canvas = min(webp_pixels(encoded), self._max_pixels)
            header = HEADER_MEMORY + 4 * len(encoded) + WEBP_MEMORY * canvas
            with process_limits(task.seconds, header):
                image = open_image(encoded, self._max_pixels)
            width, height = image.size
            with process_limits(task.seconds, self._memory(width * height)):
                pixels, grid = self._processor.process(decode(image), task.detail)
        except ImageError as error:
            return ImageDone(error=str(error))
        except MemoryError:
            raise
        except Exception:
            return ImageDone(error="the image processor of the model refuses the image")
        if pixels.nbytes > self._max_bytes:
            return ImageDone(
                error=f"the pixels of the image take {pixels.nbytes} bytes, more than the limit of "
                f"{self._max_bytes} (--media-memory)"
            )
        try:
            descriptor = os.open(
                os.path.join(self._folder, task.name),
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o600,
            )
            with open(descriptor, "wb") as output:
                output.write(pixels.data)
        except OSError:
            self._remove(task.name)
            return ImageDone(error="there is no memory for the pixels of the image", kind="host")
        return ImageDone(tuple(pixels.shape), grid)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))


def main() -> None:
    """Run the process; its standard input is the front end's socket.

    Arguments: the file of encoded images, the folder for pixels, the most pixels of an image, the
    most bytes of those made of it, the prepared folder of the model, and its architecture.
    """
    file, folder, max_pixels, max_bytes, model_folder, architecture = sys.argv[1:]
    with contextlib.suppress(ConnectionError), socket.socket(fileno=os.dup(0)) as channel:
        server = MediaServer(channel, int(file), folder, int(max_pixels), int(max_bytes))
        server.run(model_folder, architecture)


if __name__ == "__main__":
    main()
