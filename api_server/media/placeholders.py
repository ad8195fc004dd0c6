"""The text that stands for an image in a prompt, as transformers' processors write it.

    template     … user: <image> What is this?
    expansion    … user: <image><image><image><image> What is this?     LLaVA: a token for each row
    of encoder output; the tiled models add markers for tiles, Gemma 3 for the ends of the image,
    Pixtral for the ends of its lines

A chat template writes a placeholder for each image, which the expansion replaces before the text is
tokenised. How many image tokens it has follows from the shape of the pixels and from the model's
configuration, so it is what the vision part computes.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel, read_model_file

TILED: Final = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
"""Architectures that divide an image into tiles."""
GRIDS: Final = (
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
)
"""Architectures whose images have a grid of patches of any size."""


class Expansion(NamedTuple):
    """Text that stands for an image, and the number of image tokens in it."""

    text: str
    num_embeds: int


@dataclass(frozen=True)
class Placeholders(ABC):
    """How images stand in the prompts of a model.

    image_token: text of the token whose embedding is replaced.
    """

    image_token: str

    @property
    def placeholder(self) -> str:
        """Text that the chat template writes for an image."""
        return self.image_token

    @abstractmethod
    def expand(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> Expansion:
        """Return what replaces the placeholder.

        shape: of the pixels, [tiles or patches, channels, height, width]. grid: as in
        MultiModalFeature.
        """


@dataclass(frozen=True)
class RowPlaceholders(Placeholders):
    """LLaVA: an image token for each row of encoder output.

    patch_size: of the tower. num_extra: rows beside those of patches, negative if some are dropped.
    """

    patch_size: int
    num_extra: int

    def expand(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> Expansion:
        _, _, height, width = shape
        num_patches = (height // self.patch_size) * (width // self.patch_size)
        num_embeds = num_patches + self.num_extra
        return Expansion(self.image_token * num_embeds, num_embeds)


@dataclass(frozen=True)
class GridPlaceholders(Placeholders):
    """Qwen-VL: an image token for each square of patches between markers, as templates write one.

    merge: patches of a side of a square.
    """

    begin: str
    end: str
    merge: int

    @property
    def placeholder(self) -> str:
        return f"{self.begin}{self.image_token}{self.end}"

    def expand(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> Expansion:
        num_embeds = math.prod(grid) // self.merge**2
        return Expansion(f"{self.begin}{self.image_token * num_embeds}{self.end}", num_embeds)


@dataclass(frozen=True)
class TilePlaceholders(Placeholders):
    """Idefics 3 and SmolVLM: rows and columns of tiles, then the whole image.

    pixels_per_row: side of the square of pixels that becomes one row of output.
    fake_token, global_token: markers around tiles, and before the whole image.
    """

    pixels_per_row: int
    fake_token: str
    global_token: str

    def expand(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> Expansion:
        num_tiles, _, height, width = shape
        rows, columns = grid
        per_tile = (height // self.pixels_per_row) * (width // self.pixels_per_row)
        images = self.image_token * per_tile
        fake = self.fake_token
        whole = f"{fake}{self.global_token}{images}{fake}"
        if not rows:
            return Expansion(whole, per_tile)
        lines = [
            "".join(f"{fake}<row_{row}_col_{column}>{images}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        return Expansion("\n".join([*lines, "", whole]), per_tile * num_tiles)


@dataclass(frozen=True)
class FramedPlaceholders(Placeholders):
    """Gemma 3: a fixed number of image tokens between markers, in a paragraph of their own."""

    begin: str
    end: str
    num_embeds: int

    @property
    def placeholder(self) -> str:
        return self.begin

    def expand(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> Expansion:
        text = f"\n\n{self.begin}{self.image_token * self.num_embeds}{self.end}\n\n"
        return Expansion(text, self.num_embeds)


@dataclass(frozen=True)
class LinePlaceholders(Placeholders):
    """Pixtral and Mistral 3: lines of image tokens, each with a marker behind it.

    pixels_per_row: side of the square of pixels that becomes one row of output. line_end, end:
    markers of lines, and of the last one.
    """

    pixels_per_row: int
    line_end: str
    end: str

    def expand(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> Expansion:
        _, _, height, width = shape
        lines, columns = height // self.pixels_per_row, width // self.pixels_per_row
        text = self.line_end.join([self.image_token * columns] * lines) + self.end
        return Expansion(text, lines * columns)


def read_placeholders(model: PreparedModel, token_text: Callable[[int], str]) -> Placeholders:
    """Return how images stand in the prompts of a model that has a vision part.

    token_text: text of a token id. Raises ModelError if a setting is missing or the architecture is
    unknown.
    """
    assert model.vision is not None
    architecture = model.vision.architecture
    image_token = token_text(model.vision.image_token_id)
    prepared = read_settings(model.folder, "config.json")
    config = {**prepared, **inner(prepared, "vision_projector")}
    names = read_settings(model.folder, "tokenizer_config.json")
    names = {**inner(names, "extra_special_tokens"), **names}
    vision = inner(config, "vision_config")
    is_pixtral = vision.get("model_type") == "pixtral"
    if architecture.startswith("Mistral3") or (is_pixtral and architecture.startswith("Llava")):
        names |= read_settings(model.folder, "processor_config.json")
        line_end = _text(names, "image_break_token", "[IMG_BREAK]")
        end = _text(names, "image_end_token", "[IMG_END]")
        return LinePlaceholders(image_token, pixels_per_row(prepared), line_end, end)
    if architecture == "LlavaForConditionalGeneration":
        has_class_token = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        drops_first = config.get("vision_feature_select_strategy", "default") == "default"
        num_extra = int(has_class_token) - int(drops_first)
        return RowPlaceholders(image_token, _positive(vision, "patch_size", 14), num_extra)
    if architecture in GRIDS:
        ids = (config.get(f"vision_{name}_token_id") for name in ("start", "end"))
        begin, end = (token_text(each) or "" if type(each) is int else "" for each in ids)
        merge = _positive(vision, "spatial_merge_size", 2)
        return GridPlaceholders(image_token, begin, end, merge)
    if architecture in TILED:
        scale, patch = _positive(config, "scale_factor", 2), _positive(vision, "patch_size", 32)
        fake, whole = "<fake_token_around_image>", "<global-img>"
        if architecture.startswith("SmolVLM"):  # whose processor lets a tokenizer name them
            fake = _text(names, "fake_image_token", fake)
            whole = _text(names, "global_image_token", whole)
        return TilePlaceholders(image_token, scale * patch, fake, whole)
    if architecture == "Gemma3ForConditionalGeneration":
        begin = _text(names, "boi_token", "<start_of_image>")
        end = _text(names, "eoi_token", "<end_of_image>")
        num_embeds = _positive(config, "mm_tokens_per_image", 256)
        return FramedPlaceholders(image_token, begin, end, num_embeds)
    raise ModelError(f"images of {architecture} have no known placeholder")


def pixels_per_row(config: dict[str, Any]) -> int:
    """Return the side of the square of pixels that becomes one row of output of Pixtral's tower.

    config: of the prepared folder. Raises ModelError for sizes out of bounds.
    """
    outside = {**config, **inner(config, "vision_projector")}
    merged = _positive(outside, "spatial_merge_size", 1)
    return merged * _positive(inner(config, "vision_config"), "patch_size", 16)


def _positive(settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key, default)
    if not isinstance(value, int) or not 0 < value < 1 << 16:
        raise ModelError(f"config.json: {key} is not a number of pixels or tokens")
    return value


def _text(settings: Mapping[str, Any], key: str, default: str) -> str:
    """Return the text of a token, which may be an object with its `content`."""
    value = settings.get(key, default)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else default


def read_settings(folder: str, name: str) -> dict[str, Any]:
    """Return the object in a file of a folder, empty without the file; raises ModelError."""
    try:
        content = json.loads(read_model_file(Path(folder, name)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name}: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{name}: an object is needed")
    return content


def processor_settings(folder: str) -> dict[str, Any]:
    """Return the settings of the image processor in a folder; raises ModelError.

    transformers 5 writes them into processor_config.json.
    """
    settings = read_settings(folder, "preprocessor_config.json")
    return settings or inner(read_settings(folder, "processor_config.json"), "image_processor")


def inner(settings: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object within settings, an empty one if there is none."""
    value = settings.get(key)
    return value if isinstance(value, dict) else {}
