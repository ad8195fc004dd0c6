"""Folders of models that read images, without weights, and encoded images."""

import base64
import io
import json
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from api_server.media.reader import ImageSource, LoadedImage, MediaReader
from proto.messages.prepared_model import PreparedModel, VisionFacts
from proto.runtime.run_directory import pixels_folder
from proto.settings.config import MediaConfig
from tests.fakes.tiny_vision import IMAGE_ID, VISION_MODELS, VisionModel, vision_processor

PIXEL_TYPE = np.dtype("<f4")


def vision_folder(name: str, folder: Path, **processor: Any) -> PreparedModel:
    """Write what a front end reads of a model of `tiny_vision`, and return its manifest.

    processor: changed settings of the image processor.
    """
    described = VISION_MODELS[name]
    folder.mkdir(exist_ok=True)
    vision_processor(name).tokenizer.save_pretrained(folder)
    config = {"vision_config": described.vision, **described.outside}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(described.settings))
    settings = json.loads(described.image_processor.to_json_string()) | processor
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return manifest(described, folder)


def manifest(described: VisionModel, folder: Path) -> PreparedModel:
    return PreparedModel(
        folder=str(folder),
        name="tiny",
        source=str(folder),
        architecture="LlamaForCausalLM",
        vocab_size=64,
        max_position=512,
        weights_sample="",
        vision=VisionFacts(
            architecture=described.architecture,
            image_token_id=IMAGE_ID,
            max_embeds=described.embeds * 5,
        ),
    )


def token_text(folder: str) -> Any:
    """Return the function from a token id to its text."""
    return Tokenizer.from_file(str(Path(folder, "tokenizer.json"))).id_to_token


@asynccontextmanager
async def open_reader(
    model: PreparedModel, run_dir: Path, **settings: Any
) -> AsyncIterator[MediaReader]:
    """Yield a reader whose pixels are below `run_dir`."""
    run_dir.mkdir(exist_ok=True)
    config = MediaConfig(**settings)
    reader = MediaReader.create(model, config, str(run_dir), "0.0", token_text(model.folder))
    try:
        yield reader
    finally:
        await reader.close()


def source(content: bytes | str | None, **fields: Any) -> ImageSource:
    """Return an image of a request. content: encoded, or a URL."""
    url = data_uri(content) if isinstance(content, bytes) else content
    param = "messages[0].content[1].image_url"
    return ImageSource(**{"url": url, "uuid": None, "detail": "auto", "param": param, **fields})


def read_pixels(image: LoadedImage, run_dir: Path) -> np.ndarray:
    """Return the pixels as a worker reads them."""
    content = Path(pixels_folder(str(run_dir)), image.pixels.name).read_bytes()
    return np.frombuffer(content, PIXEL_TYPE).reshape(image.pixels.shape)


def data_uri(encoded: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(encoded).decode()}"


def encode_image(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


# ---- Images that only say how large they are ----


def png_chunk(kind: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def png_of(width: int, height: int, *chunks: bytes) -> bytes:
    """Return a grey PNG with this size in its header, then these chunks and an end."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [png_chunk(b"IHDR", header), *chunks, png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def header_bombs() -> dict[str, bytes]:
    """Return small files of each format with the size of a large image."""
    small = Image.new("RGB", (16, 16))
    jpeg = bytearray(encode_image(small, "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    gif = bytearray(encode_image(small, "GIF"))
    gif[6:10] = struct.pack("<HH", 65000, 65000)
    frame_of_gif = bytearray(encode_image(small, "GIF"))
    begin = frame_of_gif.index(b"\x2c\x00\x00\x00\x00\x10\x00\x10\x00")
    frame_of_gif[begin + 5 : begin + 9] = struct.pack("<HH", 65000, 65000)
    canvas = struct.pack("<I", 16383)[:3]
    extended = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + canvas + canvas
    webp = b"RIFF" + struct.pack("<I", 4 + len(extended)) + b"WEBP" + extended
    lossless = bytearray(encode_image(small, "WEBP", lossless=True))
    start = lossless.index(b"VP8L") + 9
    lossless[start : start + 4] = struct.pack("<I", 16382 | 16382 << 14)
    lossy = bytearray(encode_image(small, "WEBP"))
    lossy[26:30] = struct.pack("<HH", 16383, 16383)
    return {
        "PNG": png_of(60000, 60000, png_chunk(b"IDAT", zlib.compress(bytes(60001)))),
        "JPEG": bytes(jpeg),
        "GIF": bytes(gif),
        "a frame of a GIF": bytes(frame_of_gif),
        "WebP": webp,
        "lossless WebP": bytes(lossless),
        "lossy WebP": bytes(lossy),
    }
