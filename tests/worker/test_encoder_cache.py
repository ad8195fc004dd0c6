"""The encoder cache of a worker: slices, what it forgets, and pixels that cannot be encoded."""

import os
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from proto.messages.multimodal import EncoderSlice, MultiModalFeature, SharedPixels
from proto.messages.scheduler_output import CachedRequestData, SchedulerOutput
from tests.fakes.vision import PixelEncoder, save_image
from worker.models.vision.encoder import Pixels
from worker.step.encoder_cache import EncoderCache, PixelFile

HIDDEN = 4


def rows_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def step_of(*slices: EncoderSlice, free: list[bytes] | None = None) -> SchedulerOutput:
    return SchedulerOutput(
        epoch=1,
        step=1,
        new_requests=[],
        cached_requests=CachedRequestData(),
        total_num_scheduled_tokens=0,
        finished_seq_ids=[],
        preempted_seq_ids=[],
        scheduled_encoder_inputs=list(slices),
        free_encoder_mm_hashes=free or [],
    )


class Cache:
    """An encoder cache and the images of one sequence."""

    def __init__(self, folder: Path, *features: MultiModalFeature) -> None:
        self.encoder = PixelEncoder()
        self.cache = EncoderCache(self.encoder, str(folder))  # type: ignore[arg-type]
        self.features = features

    def encode(
        self, index: int, start: float, end: float, free: list[bytes] | None = None
    ) -> list[bytes]:
        """Run a step with one slice; return the images that failed."""
        return self.run(step_of(self.slice(index, start, end), free=free))

    def slice(self, index: int, start: float, end: float) -> EncoderSlice:
        return EncoderSlice(7, index, start, end, self.features[index])

    def run(self, step: SchedulerOutput) -> list[bytes]:
        return self.cache.run_step(step).failed_mm_hashes

    def output(self, index: int) -> np.ndarray:
        feature = self.features[index]
        return self.cache.rows(feature.mm_hash, slice(0, feature.num_embeds), HIDDEN)


def test_an_image_is_encoded_in_slices_of_several_steps(tmp_path: Path) -> None:
    rows = rows_of(10)
    cache = Cache(tmp_path, save_image(tmp_path, rows, 3, 12))
    for start, end in ((0, 0.5), (0.5, 4), (4, 10)):
        assert np.isnan(cache.output(0)).all()
        assert cache.encode(0, start, end) == []
    assert np.array_equal(cache.output(0), rows)
    assert cache.encoder.shares == [[0.05, 0.4, 1.0]]
    assert cache.encoder.grids == [(1, 1)]
    part = cache.cache.rows(cache.features[0].mm_hash, slice(3, 5), HIDDEN)
    assert np.array_equal(part, rows[3:5])


def test_the_time_of_slices_is_reported(tmp_path: Path) -> None:
    cache = Cache(tmp_path, save_image(tmp_path, rows_of(2), 0, 2))
    nothing = cache.cache.run_step(step_of())
    some = cache.cache.run_step(step_of(cache.slice(0, 0, 2)))
    assert nothing.seconds == 0.0 < some.seconds


def test_freed_images_are_forgotten_finished_or_not(tmp_path: Path) -> None:
    """An image that is freed and encoded in the same step is kept."""
    first, second = (save_image(tmp_path, rows_of(4, number), 0, 4, number) for number in (1, 2))
    cache = Cache(tmp_path, first, second)
    cache.encode(0, 0, 4)
    cache.encode(1, 0, 2)
    cache.run(step_of(free=[first.mm_hash, second.mm_hash]))
    assert np.isnan(cache.output(0)).all()
    assert cache.encoder.encodings[1].is_closed
    assert cache.encode(1, 2, 4) == []
    assert np.isnan(cache.output(1)).all(), "a slice of an image that was given up"
    cache.encode(0, 0, 4, free=[first.mm_hash])
    assert np.isfinite(cache.output(0)).all()
    assert cache.encoder.shares == [[1.0], [0.5], [1.0]]


def damaged(folder: Path) -> dict[str, MultiModalFeature]:
    """Return images that cannot be encoded, by what is wrong with them."""
    whole = save_image(folder, rows_of(4), 0, 4, 9)
    size = (folder / whole.pixels.name).stat().st_size
    (folder / "0.short").write_bytes(b"\0" * (size - 4))
    (folder / "0.long").write_bytes(b"\0" * (size + 4))
    (folder / "0.nan").write_bytes(np.full((4, HIDDEN), np.nan, "<f4").tobytes())
    os.symlink(folder / whole.pixels.name, folder / "0.link")
    os.mkfifo(folder / "0.pipe")
    (folder / "0.folder").mkdir()

    def pixels(name: str, *shape: int) -> MultiModalFeature:
        return replace(whole, pixels=SharedPixels(name, shape or (4, HIDDEN)))

    return {
        "missing": pixels("0.none"),
        "short": pixels("0.short"),
        "long": pixels("0.long"),
        "NaN": pixels("0.nan"),
        "a link": pixels("0.link"),
        "a pipe": pixels("0.pipe"),
        "a folder": pixels("0.folder"),
        "a path": pixels(f"../{folder.name}/{whole.pixels.name}"),
        "no name": pixels(""),
        "another shape": pixels(whole.pixels.name, 2, 2, HIDDEN),
        "a negative shape": pixels(whole.pixels.name, -4, -HIDDEN),
        "fewer rows than tokens": replace(whole, num_embeds=5),
    }


def test_an_image_that_cannot_be_encoded_fails_alone(tmp_path: Path) -> None:
    """The other images of the step have outputs; later slices of the failed one do nothing."""
    for what, feature in damaged(tmp_path).items():
        good = save_image(tmp_path, rows_of(3), 0, 3, 2)
        cache = Cache(tmp_path, feature, good)
        end = feature.num_embeds
        step = step_of(cache.slice(0, 0, end), cache.slice(1, 0, 3))
        assert cache.run(step) == [feature.mm_hash], what
        assert np.isfinite(cache.output(1)).all(), what
        assert np.isnan(cache.output(0)).all(), what
        assert cache.encode(0, 1, end) == [], what


def test_an_image_for_which_memory_is_missing_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (save_image(tmp_path, rows_of(3, number), 0, 3, number) for number in (1, 2))
    cache = Cache(tmp_path, first, second)
    begin, calls = cache.encoder.begin, list[bool]()

    def begin_second(pixels: Pixels, grid: tuple[int, ...]) -> object:
        calls.append(True)
        if len(calls) == 1:
            raise MemoryError
        return begin(pixels, grid)

    monkeypatch.setattr(cache.encoder, "begin", begin_second)
    assert cache.run(step_of(cache.slice(0, 0, 3), cache.slice(1, 0, 3))) == [first.mm_hash]
    assert np.isfinite(cache.output(1)).all()


def test_pixels_are_little_endian_float32(tmp_path: Path) -> None:
    (tmp_path / "0.1").write_bytes(bytes([0, 0, 128, 63, 0, 0, 0, 192]))
    assert PixelFile(str(tmp_path), SharedPixels("0.1", (1, 2)))[:, :].tolist() == [[1.0, -2.0]]
    with pytest.raises(ValueError, match="8 bytes, 4 are needed"):
        PixelFile(str(tmp_path), SharedPixels("0.1", (1,)))


def test_parts_of_pixels_are_those_of_a_tensor(tmp_path: Path) -> None:
    numbers = np.arange(2 * 3 * 5 * 4, dtype="<f4").reshape(2, 3, 5, 4)
    numbers.tofile(tmp_path / "0.1")
    pixels = PixelFile(str(tmp_path), SharedPixels("0.1", numbers.shape))
    for part in (
        np.s_[:, :, :, :],
        np.s_[1:, 0:2, 2:4, 1:3],
        np.s_[:1, 2:3, 4:9, :2],
        np.s_[:, :, 0:0, :],
    ):
        assert np.array_equal(pixels[part].numpy(), numbers[part])
    tile = PixelFile(str(tmp_path), SharedPixels("0.1", (6, 5, 4)))
    assert np.array_equal(tile[:, 2:3, :, :].numpy(), numbers.reshape(1, 6, 5, 4)[:, 2:3])
