"""Images to pixels: Pillow decodes, transformers' image processors scale, cut and normalise.

Runs in the media process only, which imports Pillow and transformers. The processors are those that
need numpy and Pillow alone, so torch is never loaded (`hide_torch`).
"""

import io
import os
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import numpy as np

from api_server.media.placeholders import (
    GRIDS,
    TILED,
    inner,
    pixels_per_row,
    processor_settings,
    read_settings,
)
from proto.errors import ModelError, shown

PillowImage = Any
"""A PIL.Image.Image; the package is imported in functions only."""
FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
MAX_ASPECT_RATIO: Final = 200
"""Most times that an image is wider than high, or the reverse. Scaled until its shorter side fits a
model, a longer one would have a multiple of the pixels that it had."""
_PLUGINS: Final = ("GifImagePlugin", "JpegImagePlugin", "PngImagePlugin", "WebPImagePlugin")
_FOLDERS: Final = {
    "CLIPImageProcessor": "clip",
    "Gemma3ImageProcessor": "gemma3",
    "Idefics3ImageProcessor": "idefics3",
    "LlavaImageProcessor": "llava",
    "PixtralImageProcessor": "pixtral",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "SiglipImageProcessor": "siglip",
    "SmolVLMImageProcessor": "smolvlm",
}
"""Image processors, and transformers' folders of their models."""
_DEFAULTS: Final = {
    "Idefics3ForConditionalGeneration": "Idefics3ImageProcessor",
    "SmolVLMForConditionalGeneration": "SmolVLMImageProcessor",
    "Gemma3ForConditionalGeneration": "Gemma3ImageProcessor",
    **dict.fromkeys(GRIDS, "Qwen2VLImageProcessor"),
    "Mistral3ForConditionalGeneration": "PixtralImageProcessor",
}
"""Processor of an architecture whose settings name none."""
_OF_TOWERS: Final = {
    "pixtral": "PixtralImageProcessor",
    "siglip_vision_model": "SiglipImageProcessor",
}
"""The same for LLaVA's architecture, by the model type of its tower; of others CLIP's."""


class ImageError(Exception):
    """An image cannot be used; the message is for the client."""


def hide_torch() -> None:
    """Have transformers find no torch, which takes seconds and 200 MB to import.

    It would write into the log what it cannot do without.
    """
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def load_decoders() -> None:
    """Import the decoders of all formats."""
    for plugin in _PLUGINS:
        import_module(f"PIL.{plugin}")


def webp_pixels(encoded: bytes) -> int:
    """Return the pixels of a WebP image by its first 30 bytes, 0 for other formats.

    Pillow's decoder of WebP has memory for all of them as soon as the image is opened.
    """
    if len(encoded) < 30 or encoded[:4] != b"RIFF" or encoded[8:12] != b"WEBP":
        return 0
    chunk = encoded[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(encoded[at : at + 3], "little") + 1 for at in (24, 27))
    elif chunk == b"VP8L":
        bits = int.from_bytes(encoded[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif chunk == b"VP8 ":
        width, height = (int.from_bytes(encoded[at : at + 2], "little") & 0x3FFF for at in (26, 28))
    else:
        return 0
    return width * height


def open_image(encoded: bytes, max_pixels: int) -> PillowImage:
    """Read the header of an image; raises ImageError before anything is decoded.

    The format is the one of its first bytes. An animation is its first frame.
    """
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = (max_pixels + 1) // 2  # Pillow refuses more than twice as many
    warnings.simplefilter("ignore")
    too_many = f"the image has more than {max_pixels} pixels (--max-image-pixels)"
    if webp_pixels(encoded) > max_pixels:
        raise ImageError(too_many)
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ImageError(too_many) from None
    except MemoryError:
        raise
    except Exception:  # of many types, and with texts of the library
        raise ImageError("not an image in JPEG, PNG, WebP or GIF, or a damaged one") from None
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(too_many)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(
            f"one side of the image is more than {MAX_ASPECT_RATIO} times as long as the other"
        )
    return image


def decode(image: PillowImage) -> PillowImage:
    """Return an image with 8 bits a channel, rotated as its EXIF data says; raises ImageError."""
    from PIL import Image, ImageOps

    try:
        image.load()
    except MemoryError:
        raise
    except Exception:
        raise ImageError("the image is damaged or incomplete") from None
    try:
        image = ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF data: as it is
        pass
    if image.mode.startswith("I"):  # 16 bits of grey, also in 32
        grey = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    return image


class ImageProcessor:
    """Makes the pixels that a model takes of a decoded image.

    architecture: of the model with its vision part. settings: of its preprocessor_config.json.
    """

    def __init__(
        self, architecture: str, settings: Mapping[str, Any], config: dict[str, Any]
    ) -> None:
        """Raises ModelError for a processor that is not known. config: of the prepared folder."""
        self._is_tiled = architecture in TILED
        self._is_grid = architecture in GRIDS
        self._is_gemma = architecture.startswith("Gemma3")
        named = settings.get("image_processor_type") or settings.get("feature_extractor_type")
        if named is None:
            tower = str(inner(config, "vision_config").get("model_type"))
            named = _DEFAULTS.get(architecture, _OF_TOWERS.get(tower, "CLIPImageProcessor"))
        name = str(named).replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
        folder = _FOLDERS.get(name)
        if folder is None:
            raise ModelError(f"preprocessor_config.json: {shown(named)} is not supported")
        if folder == "pixtral":  # as transformers' processor of images and text
            settings = {**settings, "patch_size": pixels_per_row(config)}
        module = import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
        cls = getattr(module, name + "Pil")
        known = cls.valid_kwargs.__annotations__
        try:
            self._processor = cls(**{key: settings[key] for key in known if key in settings})
        except Exception as error:  # of many types
            raise ModelError(f"preprocessor_config.json: {shown(error)}") from None

    @property
    def most_grid_pixels(self) -> int:
        """Most pixels of a grid of patches, to which an image is scaled; 0 without grids."""
        return int(self._processor.size["longest_edge"]) if self._is_grid else 0

    @classmethod
    def load(cls, folder: str, architecture: str) -> "ImageProcessor":
        """Return the processor of a prepared folder; raises ModelError."""
        return cls(architecture, processor_settings(folder), read_settings(folder, "config.json"))

    def process(
        self, image: PillowImage, detail: str
    ) -> tuple["np.ndarray[Any, Any]", tuple[int, ...]]:
        """Return pixels [tiles, channels, height, width] in float32, and rows and columns of tiles.

        Of Qwen-VL's models: patches [n, channels, height, width], and frames, rows and columns of
        these. detail: "low" leaves an image whole that would be divided.
        """
        options: dict[str, Any] = {}
        if self._is_tiled:
            options["return_row_col_info"] = True
            if detail == "low":
                options["do_image_splitting"] = False
        elif self._is_gemma:  # as transformers' processor of images and text
            options["do_pan_and_scan"] = False
        images: Any = [[image]] if self._is_tiled else [image]
        batch = self._processor(images, do_convert_rgb=True, return_tensors="np", **options)
        if self._is_grid:
            return self._patches(batch)
        pixels = np.ascontiguousarray(batch["pixel_values"], dtype="<f4")
        if not self._is_tiled:
            return pixels, ()
        return pixels[0], (int(batch["rows"][0][0]), int(batch["cols"][0][0]))

    def _patches(self, batch: Any) -> tuple["np.ndarray[Any, Any]", tuple[int, ...]]:
        """Return what `process` does of patches whose pixels are there once for each frame."""
        processor = self._processor
        size = processor.patch_size
        frames = batch["pixel_values"].reshape(-1, 3, processor.temporal_patch_size, size, size)
        pixels = np.ascontiguousarray(frames[:, :, 0], dtype="<f4")
        return pixels, tuple(map(int, batch["image_grid_thw"][0]))
