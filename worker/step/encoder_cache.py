"""The encoder outputs of images: what the steps of an engine encode, and what its prompts take.

    pixels  ── begin ──▶  Encoding  ── a slice of each step ──▶  rows [num_embeds, hidden]

The engine decides what is encoded and when an output is forgotten (its EncoderCacheManager); it
knows images by `mm_hash`. Start at `EncoderCache.run_step`.
"""

import itertools
import logging
import math
import os
import stat
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from proto.messages.multimodal import EncoderSlice, MultiModalFeature, SharedPixels
from proto.messages.scheduler_output import SchedulerOutput
from worker.layers.adapters import ImageAdapter
from worker.models.vision.encoder import Encoding, VisionEncoder
from worker.step.adapter_store import AdapterStore

logger = logging.getLogger("tokend.worker")


@dataclass(frozen=True, slots=True)
class EncodedSlices:
    """What a step has encoded.

    seconds: the time it took. failed_mm_hashes: images that have no output.
    """

    seconds: float
    failed_mm_hashes: list[bytes]


NOTHING_ENCODED: Final = EncodedSlices(0.0, [])


class EncoderCache:
    """The encoder outputs of one engine's images, and those that are being computed.

    pixels_folder: of the daemon (`proto/runtime/run_directory.py`). adapters: with which images
    may be encoded; None without --enable-lora.
    """

    def __init__(
        self, encoder: VisionEncoder, pixels_folder: str, adapters: AdapterStore | None = None
    ) -> None:
        self._encoder = encoder
        self._folder = pixels_folder
        self._adapters = adapters
        self._running: dict[bytes, tuple[Encoding, ImageAdapter | None]] = {}
        self._outputs: dict[bytes, NDArray[np.float32]] = {}

    def run_step(self, step: SchedulerOutput) -> EncodedSlices:
        """Forget what the engine no longer needs, then encode the slices of a step."""
        for mm_hash in step.free_encoder_mm_hashes:
            self._stop(mm_hash)
            self._outputs.pop(mm_hash, None)
        if not step.scheduled_encoder_inputs:
            return NOTHING_ENCODED
        begin, failed = time.monotonic(), list[bytes]()
        for part in step.scheduled_encoder_inputs:
            feature = part.feature
            assert feature is not None, "a slice brings its image"
            try:
                self._encode(part, feature)
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                logger.warning("image %s: %r", feature.pixels.name, error)
                self._stop(feature.mm_hash)
                failed.append(feature.mm_hash)
        return EncodedSlices(time.monotonic() - begin, failed)

    def rows(self, mm_hash: bytes, rows: slice, hidden_size: int) -> NDArray[np.float32]:
        """Return rows [n, hidden] of the output of an image.

        They are NaN for an image that failed, so that its sequences fail and not the worker.
        """
        output = self._outputs.get(mm_hash)
        if output is None:
            return np.full((rows.stop - rows.start, hidden_size), np.nan, dtype=np.float32)
        return output[rows]

    def _stop(self, mm_hash: bytes) -> None:
        """End the encoding of an image, if there is one."""
        if (running := self._running.pop(mm_hash, None)) is not None:
            running[0].close()

    def _encode(self, part: EncoderSlice, feature: MultiModalFeature) -> None:
        mm_hash = feature.mm_hash
        if part.start == 0:
            self._stop(mm_hash)
            pixels, store = PixelFile(self._folder, feature.pixels), self._adapters
            own = None if store is None else store.of_image(part.lora_int_id, part.lora_scale)
            self._running[mm_hash] = (self._encoder.begin(pixels, feature.grid), own)
        running = self._running.get(mm_hash)
        if running is None:
            return  # an earlier slice failed
        encoding, adapter = running
        with nullcontext() if adapter is None else adapter.encoding():
            encoding.advance(part.end / feature.num_embeds)
        if not part.is_last:
            return
        output = encoding.output
        if len(output) != feature.num_embeds:
            raise ValueError(f"it has {len(output)} rows of output, not {feature.num_embeds}")
        if not output.isfinite().all():
            raise ValueError("its output has NaN or infinity")
        del self._running[mm_hash]
        self._outputs[mm_hash] = output.float().numpy(force=True)


class PixelFile:
    """Pixels of an image in a file, little-endian float32 in C order, read part by part.

    A slice of an image reads what it needs: all pixels of a large image at once would take as long
    as a step. They are copied, since reading a mapped file that has become shorter would kill the
    process. One tile may lack the first dimension in its file.
    Raises OSError, or ValueError for a file of another size.
    """

    def __init__(self, folder: str, pixels: SharedPixels) -> None:
        if os.path.basename(pixels.name) != pixels.name:
            raise ValueError("the name of its pixels is a path")
        self.shape = (1, *pixels.shape) if len(pixels.shape) == 3 else pixels.shape
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._file = os.open(os.path.join(folder, pixels.name), flags)
        weakref.finalize(self, os.close, self._file)
        status, needed = os.fstat(self._file), 4 * math.prod(self.shape)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("its pixels are not in a file")
        if status.st_size != needed or min(self.shape, default=0) <= 0:
            raise ValueError(f"its pixels have {status.st_size} bytes, {needed} are needed")

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        """Read a part: a range of each dimension, in steps of one."""
        ranges = [range(*each.indices(size)) for each, size in zip(part, self.shape, strict=True)]
        *outer, lines, columns = ranges
        width = self.shape[-1]
        found = np.empty((*map(len, outer), len(lines), width), "<f4")
        areas = found.reshape(math.prod(map(len, outer)), len(lines) * width)
        for area, place in zip(areas, itertools.product(*outer), strict=True):
            position = 0
            for index, size in zip((*place, lines.start), self.shape, strict=False):
                position = position * size + index
            self._read(area.data.cast("B"), 4 * position * width)
        found = found[..., columns.start : columns.stop].astype(np.float32, copy=False)
        return torch.from_numpy(found)

    def _read(self, area: memoryview, offset: int) -> None:
        while area:
            count = os.preadv(self._file, [area], offset)
            if not count:
                raise ValueError("its pixels became shorter while they were read")
            area, offset = area[count:], offset + count
