"""Images become the pixels of transformers' processors, and bad ones cost their request only."""

import asyncio
import io
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps

from api_server import task_process
from api_server.media.image_processors import webp_pixels
from api_server.media.media_process import MAX_FRAME, MODULE, ImageTask
from api_server.media.reader import LoadedImage, MediaReader
from proto.codec import encode
from proto.errors import (
    InternalRequestError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
)
from proto.runtime.run_directory import pixels_folder
from tests.fakes.media import (
    encode_image,
    header_bombs,
    open_reader,
    png_chunk,
    png_of,
    read_pixels,
    source,
    vision_folder,
)
from tests.fakes.tiny_vision import VISION_MODELS, pixels_of, random_image, reference_inputs

pytestmark = pytest.mark.suite("long")

SIZES = {"square": (30, 30), "wide": (90, 40), "high": (20, 90), "a pixel": (1, 1)}
PART = "messages[0].content[1].image_url"
LIBRARY_WORDS = ("0x", "PIL", "BytesIO", "Traceback", "/usr", "site-packages", "cannot identify")


def media_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if MODULE in " ".join(child.cmdline())]


def pixel_files(run_dir: Path) -> list[str]:
    return os.listdir(pixels_folder(str(run_dir)))


async def read_one(reader: MediaReader, encoded: bytes, **fields: str) -> LoadedImage:
    (image,) = await reader.read([source(encoded, **fields)], 0, None)
    return image


async def failure(reader: MediaReader, encoded: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await read_one(reader, encoded)
    assert caught.value.param == PART
    assert caught.value.message.startswith(f"{PART}: ")
    assert not any(word in caught.value.message for word in LIBRARY_WORDS)
    return caught.value


@pytest.mark.parametrize("name", VISION_MODELS)
async def test_pixels_are_those_of_transformers_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = vision_folder(name, tmp_path / "m")
    async with open_reader(model, tmp_path / "run") as reader:
        for size in SIZES.values():
            image = random_image(1, *size)
            loaded = await read_one(reader, encode_image(image))
            reference = reference_inputs(name, [image], f"a{VISION_MODELS[name].placeholder}b")
            expected, grid = pixels_of(reference)
            pixels = read_pixels(loaded, tmp_path / "run")
            assert pixels.shape[-3:] == expected.shape[-3:]
            assert np.array_equal(pixels, expected.numpy())
            assert not grid or loaded.grid == grid
            assert loaded.num_embeds == loaded.expansion.count("<image>")


Check = Callable[[bytes, Image.Image], Awaitable[None]]


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
async def reader(tmp_path: Path, run_dir: Path) -> AsyncIterator[MediaReader]:
    """Images keep their shape and are scaled to 24 pixels."""
    model = vision_folder("llava siglip", tmp_path / "m")
    async with open_reader(model, run_dir, max_image_pixels=1_000_000) as opened:
        yield opened


@pytest.fixture
async def same(reader: MediaReader, run_dir: Path) -> Check:
    """Checks that an encoded image is read as this one."""

    async def check(encoded: bytes, image: Image.Image) -> None:
        loaded = await read_one(reader, encoded)
        expected = reference_inputs("llava siglip", [image], "<image>")["pixel_values"].numpy()
        assert np.array_equal(read_pixels(loaded, run_dir), expected)

    return check


def opened(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
async def test_each_format_is_read(same: Check, kind: str) -> None:
    encoded = encode_image(random_image(1, 40, 30), kind)
    await same(encoded, opened(encoded).convert("RGB"))


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 1, "method": 0}])
async def test_a_large_webp_image_is_read(
    tmp_path: Path, run_dir: Path, options: dict[str, object]
) -> None:
    model = vision_folder("llava siglip", tmp_path / "m")
    encoded = encode_image(Image.new("RGB", (5000, 5000), "white"), "WEBP", **options)
    async with open_reader(model, run_dir, media_timeout=60.0) as reader:
        loaded = await read_one(reader, encoded)
        pixels = read_pixels(loaded, run_dir)
        assert pixels.min() == pixels.max()


@pytest.mark.parametrize(
    "options",
    [{}, {"lossless": True}, {"exif": b"Exif\0\0"}, {"save_all": True, "append_images": []}],
)
def test_the_size_of_a_webp_image_is_in_its_first_bytes(options: dict[str, object]) -> None:
    encoded = encode_image(random_image(1, 41, 30), "WEBP", **options)
    assert webp_pixels(encoded[:30]) == 41 * 30
    assert webp_pixels(encoded[:29]) == 0
    assert webp_pixels(encode_image(random_image(1, 41, 30))) == 0


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
async def test_an_animation_is_its_first_frame(same: Check, kind: str) -> None:
    frames = [random_image(seed, 40, 30).quantize(8).convert("RGB") for seed in (1, 2, 3)]
    options = {"lossless": True} if kind == "WEBP" else {}
    encoded = encode_image(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    await same(encoded, frames[0])


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_photos_are_rotated_as_their_exif_data_says(same: Check, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode_image(random_image(1, 40, 30), "JPEG", exif=exif)
    await same(encoded, ImageOps.exif_transpose(opened(encoded)))


async def test_cmyk_is_converted(same: Check) -> None:
    encoded = encode_image(random_image(1, 40, 30).convert("CMYK"), "JPEG")
    await same(encoded, opened(encoded).convert("RGB"))


async def test_of_16_bits_the_upper_8_count(same: Check) -> None:
    grey = np.asarray(random_image(1, 40, 30).convert("L"))
    encoded = encode_image(Image.fromarray(grey.astype(np.uint16) * 256 + 255), "PNG")
    assert opened(encoded).mode.startswith("I")
    await same(encoded, Image.fromarray(grey).convert("RGB"))


async def test_transparency_is_over_white(same: Check) -> None:
    image = random_image(1, 40, 30)
    alpha = random_image(2, 40, 30).convert("L")
    expected = Image.composite(image, Image.new("RGB", (40, 30), "white"), alpha)
    transparent = image.copy()
    transparent.putalpha(Image.new("L", (40, 30), 0))
    await same(encode_image(transparent), Image.new("RGB", (40, 30), "white"))
    image.putalpha(alpha)
    encoded = encode_image(image)
    difference = np.subtract(expected, opened(encoded).convert("RGB"), dtype=int)
    assert np.abs(difference).max() > 10, "the background matters"
    await same(encoded, opened(encoded))  # transformers composes it in the same way


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
async def test_every_mode_is_read(same: Check, mode: str) -> None:
    encoded = encode_image(random_image(1, 40, 30).convert(mode))
    await same(encoded, opened(encoded))


async def test_a_polyglot_is_what_it_begins_with(same: Check) -> None:
    image = random_image(1, 40, 30)
    encoded = encode_image(image)
    await same(encoded + b"<svg></svg><script>" + encode_image(random_image(2, 9, 9), "GIF"), image)


def truncated(kind: str) -> bytes:
    encoded = encode_image(random_image(1, 200, 100), kind)
    return encoded[: len(encoded) // 2]


def bad_images() -> dict[str, bytes]:
    png = encode_image(random_image(1, 40, 30))
    noise = np.random.default_rng(0).bytes(5000)
    frame = png.index(b"IDAT")
    text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(20 << 20)))
    return {
        "nothing": b"",
        "a byte": b"\x89",
        "text": b"hello, this is not an image",
        "noise": noise,
        "SVG": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9"></svg>',
        "PDF": b"%PDF-1.7\n1 0 obj <<>> endobj",
        "BMP": encode_image(random_image(1, 9, 9), "BMP"),
        "TIFF": encode_image(random_image(1, 9, 9), "TIFF"),
        "ICO": encode_image(random_image(1, 32, 32), "ICO"),
        "PPM": encode_image(random_image(1, 9, 9), "PPM"),
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n",
        "JPEG 2000": b"\x00\x00\x00\x0cjP  \r\n\x87\n" + noise,
        "a header alone": png_of(40, 30),
        "another checksum": png[: frame + 10] + bytes(4) + png[frame + 14 :],
        "a text that unpacks to much": png_of(40, 30, text),
        "no pixel": png_of(0, 9, png_chunk(b"IDAT", zlib.compress(b""))),
        "too wide": encode_image(Image.new("L", (10_000, 1))),
        "too high": encode_image(Image.new("L", (1, 10_000))),
        "too many pixels": encode_image(Image.new("L", (1001, 1000))),
        **{f"half a {kind}": truncated(kind) for kind in ("JPEG", "PNG", "WEBP", "GIF")},
        **{f"a bomb in {kind}": encoded for kind, encoded in header_bombs().items()},
    }


async def test_bad_images_are_errors_of_their_part(reader: MediaReader, run_dir: Path) -> None:
    """All in one process, which goes on and has not grown."""
    await read_one(reader, encode_image(random_image(1, 40, 30)))
    (process,) = media_processes()
    before = process.memory_info().rss
    for name, encoded in bad_images().items():
        began = time.monotonic()
        error = await failure(reader, encoded)
        assert isinstance(error, InvalidRequestError), name
        assert time.monotonic() - began < 2.0, name
        if name.startswith(("a bomb", "too many")):
            assert "more than 1000000 pixels" in error.message, name
    assert media_processes() == [process]
    assert process.memory_info().rss - before < 32 << 20
    assert len(pixel_files(run_dir)) == 1


async def test_an_image_of_as_many_pixels_as_are_allowed_is_read(reader: MediaReader) -> None:
    await read_one(reader, encode_image(Image.new("L", (1000, 1000))))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # of this process
async def test_damaged_exif_data_does_not_matter(same: Check) -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(20)
    encoded = encode_image(random_image(1, 40, 30), "JPEG", exif=exif)
    await same(encoded, opened(encoded).convert("RGB"))


async def test_a_jpeg_with_a_preview_is_its_first_image(same: Check) -> None:
    first = random_image(1, 40, 30)
    encoded = encode_image(first, "MPO", save_all=True, append_images=[random_image(2, 40, 30)])
    await same(encoded, opened(encoded).convert("RGB"))


# ---- The process ----


async def test_an_image_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    """The settings of the model announce pixels that no machine has."""
    size = {"height": 100_000, "width": 100_000}
    model = vision_folder("llava siglip", tmp_path / "m", size=size)
    async with open_reader(model, tmp_path / "run") as reader:
        for _ in range(2):
            error = await failure(reader, encode_image(random_image(1, 9, 9)))
            assert error.message.endswith(": the image takes too much memory")
        assert pixel_files(tmp_path / "run") == []


async def stopped(reader: MediaReader) -> psutil.Process:
    """Return the process of the reader, which does not go on."""
    await read_one(reader, encode_image(random_image(9, 9, 9)))
    (process,) = media_processes()
    process.suspend()
    return process


@pytest.fixture
async def hasty(tmp_path: Path, run_dir: Path) -> AsyncIterator[MediaReader]:
    model = vision_folder("llava siglip", tmp_path / "m")
    async with open_reader(model, run_dir, media_timeout=2.0) as opened:
        yield opened


async def test_a_process_that_hangs_costs_its_request(hasty: MediaReader, run_dir: Path) -> None:
    process = await stopped(hasty)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.05)
            ticks += 1

    other = asyncio.create_task(tick())
    error = await failure(hasty, encode_image(random_image(1, 9, 9)))
    other.cancel()
    assert isinstance(error, InvalidRequestError)
    assert "longer than 2 s" in error.message
    assert ticks > 10, "the event loop was not blocked"
    assert not process.is_running()
    await read_one(hasty, encode_image(random_image(1, 9, 9)))
    assert len(media_processes()) == 1
    assert len(pixel_files(run_dir)) == 2


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGKILL, OverloadedError),
        (signal.SIGSEGV, InvalidRequestError),
        (signal.SIGPROF, InvalidRequestError),
    ],
)
async def test_a_process_that_dies_costs_its_request(
    hasty: MediaReader, run_dir: Path, number: int, kind: type[RequestError]
) -> None:
    process = await stopped(hasty)
    waiting = asyncio.create_task(failure(hasty, encode_image(random_image(1, 9, 9))))
    await asyncio.sleep(0.2)
    process.send_signal(number)
    process.resume()
    assert type(await waiting) is kind
    await read_one(hasty, encode_image(random_image(1, 9, 9)))
    assert len(pixel_files(run_dir)) == 2


def sizes_of_memory_files() -> list[int]:
    """Return the bytes in the files that this process shares with others."""
    links = [each for each in Path("/proc/self/fd").iterdir() if each.exists()]
    return [each.stat().st_size for each in links if os.readlink(each).startswith("/memfd:tokend")]


async def test_a_photo_of_a_phone_fits_into_the_memory_of_a_grid(tmp_path: Path) -> None:
    """16 megapixels, which Qwen3-VL's own settings hardly scale."""
    size = {"longest_edge": 16_777_216, "shortest_edge": 65_536}
    model = vision_folder("qwen3_vl", tmp_path / "m", size=size, patch_size=16)
    async with open_reader(model, tmp_path / "run", media_memory=1 << 30) as reader:
        loaded = await read_one(reader, encode_image(Image.new("RGB", (4608, 3456))))
        assert math.prod(loaded.pixels.shape) > 3 * 15_000_000


async def test_a_write_that_goes_on_after_its_timeout_reaches_no_other_file(
    hasty: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, ended, write = threading.Event(), threading.Event(), task_process._write

    def write_late(file: BinaryIO, content: bytes) -> None:
        goes_on.wait()
        write(file, content)
        ended.set()

    await read_one(hasty, encode_image(random_image(1, 9, 9)))
    with monkeypatch.context() as patch:
        patch.setattr(task_process, "_write", write_late)
        error = await failure(hasty, encode_image(random_image(2, 9, 9)))
        assert "longer than 2 s" in error.message
    while not media_processes():
        await asyncio.sleep(0.01)
    goes_on.set()
    assert await asyncio.to_thread(ended.wait, 10)
    assert not any(sizes_of_memory_files()), "the file of the next process"
    await read_one(hasty, encode_image(random_image(2, 9, 9)))


async def test_a_process_that_ends_between_images_costs_nothing(hasty: MediaReader) -> None:
    await read_one(hasty, encode_image(random_image(1, 9, 9)))
    (process,) = media_processes()
    process.kill()
    process.wait()
    await read_one(hasty, encode_image(random_image(2, 9, 9)))


@pytest.mark.parametrize("is_started", [True, False], ids=["processing", "starting"])
async def test_an_image_that_is_read_when_the_reader_is_closed_is_overloaded(
    tmp_path: Path, run_dir: Path, is_started: bool
) -> None:
    """At once, and so is the next one, which waits for the first."""
    model = vision_folder("llava siglip", tmp_path / "m")
    async with open_reader(model, run_dir, media_timeout=60.0) as reader:
        if is_started:
            await stopped(reader)
        images = [encode_image(random_image(seed, 9, 9)) for seed in (1, 2, 3)]
        waiting = [asyncio.create_task(failure(reader, image)) for image in images[:2]]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            await reader.close()
            errors = [*await asyncio.gather(*waiting), await failure(reader, images[2])]
        assert [type(error) for error in errors] == [OverloadedError] * 3
        reader.warm_up()
        await asyncio.sleep(0.1)
        assert media_processes() == []
        assert len(pixel_files(run_dir)) == is_started, "the first one is in use"


@pytest.mark.parametrize(
    "changes",
    [{"image_processor_type": "FuyuImageProcessor"}, {"size": "large"}, {"crop_size": {"a": 1}}],
)
async def test_settings_that_the_process_cannot_use_are_an_internal_error(
    changes: dict[str, object], tmp_path: Path
) -> None:
    model = vision_folder("llava", tmp_path / "m", **changes)
    async with open_reader(model, tmp_path / "run") as reader:
        error = await failure(reader, encode_image(random_image(1, 9, 9)))
        assert isinstance(error, InternalRequestError)
        assert "preprocessor_config.json" in error.message


async def test_a_machine_without_processes_is_overloaded(
    reader: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise BlockingIOError("fork: resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        error = await failure(reader, encode_image(random_image(1, 9, 9)))
        assert isinstance(error, OverloadedError)
    await read_one(reader, encode_image(random_image(1, 9, 9)))


async def test_a_folder_without_space_is_overloaded(tmp_path: Path, run_dir: Path) -> None:
    model = vision_folder("llava", tmp_path / "m")
    async with open_reader(model, run_dir) as reader:
        await read_one(reader, encode_image(random_image(1, 9, 9)))
        os.rename(pixels_folder(str(run_dir)), tmp_path / "elsewhere")
        error = await failure(reader, encode_image(random_image(2, 9, 9)))
        assert isinstance(error, OverloadedError)
        assert "no memory for the pixels" in error.message
        os.rename(tmp_path / "elsewhere", pixels_folder(str(run_dir)))


async def test_the_process_imports_no_torch(reader: MediaReader) -> None:
    await read_one(reader, encode_image(random_image(1, 9, 9)))
    (process,) = media_processes()
    assert not [each for each in process.memory_maps() if "libtorch" in each.path]
    assert process.memory_info().rss < 200 << 20


async def test_the_process_has_few_rights(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEND_API_KEY", "secret")
    model = vision_folder("llava siglip", tmp_path / "m")
    async with open_reader(model, run_dir, media_memory=1 << 20) as reader:
        await read_one(reader, encode_image(random_image(1, 9, 9)))
        (process,) = media_processes()
        assert "secret" not in process.environ().values()
        assert "NoNewPrivs:\t1\n" in Path(f"/proc/{process.pid}/status").read_text()
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: 1 << 20,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_NPROC: 0,
        }
        assert {kind: process.rlimit(kind)[1] for kind in limits} == limits
        assert process.rlimit(resource.RLIMIT_AS)[1] < 8 << 30
        await read_one(reader, encode_image(random_image(2, 9, 9)))
        assert media_processes() == [process]


async def test_pixels_beyond_the_memory_for_them_are_not_written(
    tmp_path: Path, run_dir: Path
) -> None:
    model = vision_folder("llava siglip", tmp_path / "m")
    async with open_reader(model, run_dir, media_memory=1000) as reader:
        error = await failure(reader, encode_image(random_image(1, 9, 9)))
        assert isinstance(error, InvalidRequestError)
        assert "more than the limit of 1000 (--media-memory)" in error.message


def test_the_process_ends_with_its_front_end(tmp_path: Path) -> None:
    """The front end dies while an image is processed; its pixels are removed."""
    model = vision_folder("llava", tmp_path / "m")
    (tmp_path / "pixels").mkdir()
    encoded = encode_image(random_image(1, 9, 9))
    file = os.memfd_create("image")
    os.write(file, encoded)
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = (
        str(tmp_path / "pixels"),
        "1000",
        "9999",
        model.folder,
        "LlavaForConditionalGeneration",
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(file), *arguments],
            stdin=theirs.fileno(),
            stderr=subprocess.PIPE,
            pass_fds=[file],
        )
    with own:
        assert own.recv(MAX_FRAME)  # it is ready
        own.send(encode(ImageTask(len(encoded), "0.0.0", "", 10.0)))
        assert own.recv(MAX_FRAME)
        process.send_signal(signal.SIGSTOP)
        own.send(encode(ImageTask(len(encoded), "0.0.1", "", 10.0)))
    process.send_signal(signal.SIGCONT)
    assert (process.communicate(timeout=20)[1], process.returncode) == (b"", 0)
    os.close(file)
    assert os.listdir(tmp_path / "pixels") == ["0.0.0"]
