"""Idefics 3 and SmolVLM: SigLIP over the tiles of an image and the whole image, pixel shuffle."""

from collections.abc import Mapping
from typing import Any, Final

from proto.errors import ModelError, shown
from worker.models.config_reader import ConfigReader
from worker.models.vision.spec import (
    GgufSettings,
    VisionConfig,
    VisionFamily,
    VisionGguf,
)
from worker.models.vision.tile_spec import (
    ShuffleProjector,
    TileSpec,
    read_tower,
)


def spec(config: VisionConfig) -> TileSpec:
    tower = read_tower(config.tower, takes_other_sizes=True)
    scale = config.settings.integer("scale_factor", 2, most=tower.side)
    if tower.side % scale:
        reason = f"it must divide the {tower.side} patches of a tile's side"
        raise config.settings.refusal("scale_factor", scale, reason)
    return TileSpec(
        architecture=config.architecture,
        tower=tower,
        projector=ShuffleProjector(scale=scale),
        output_size=config.output_size,
        max_tiles=_max_tiles(config.images, tower.image_size),
    )


def _max_tiles(images: ConfigReader, image_size: int) -> int:
    """Return the tiles of the largest image, cut into rows and columns, and the image itself.

    Raises ModelError for tiles of another size than that of the tower: the image processor would
    make other numbers of rows than the prompt has tokens for.
    """
    tile = _longest_edge(images, "max_image_size", _TILE)
    if tile != image_size:
        raise images.refusal("max_image_size", tile, f"the tower has image_size = {image_size}")
    if not images.flag("do_image_splitting", True):
        return 1
    # Tiles cover the image, whose longer side is resized to this, or to the largest that it may be.
    cuts = -(-min(_longest_edge(images, "size", 4 * _TILE), _LARGEST) // tile)
    return 1 if cuts == 1 else cuts * cuts + 1


def _longest_edge(images: ConfigReader, key: str, default: int) -> int:
    value = images.mapping(key).get("longest_edge", default)
    if type(value) is not int or value < 1:
        raise ModelError(f"preprocessor_config.json: {key}: longest_edge = {shown(repr(value))}")
    return value


_TILE: Final = 364
"""Pixels of a tile's side where the image processor's settings leave it out."""
_LARGEST: Final = 4096
"""Pixels of a side to which the image processor bounds an image."""


def _gguf_settings(vision: Mapping[str, Any], side: int, scale: int) -> GgufSettings:
    size = vision["image_size"]
    return GgufSettings(
        projector={"scale_factor": scale},
        images={
            "image_processor_type": "Idefics3ImageProcessor",
            "max_image_size": {"longest_edge": size},
            "size": {"longest_edge": vision.get("preproc_image_size", 4 * size)},
        },
        processor={
            "processor_class": "Idefics3Processor",
            "image_seq_len": (side // scale) ** 2,
        },
    )


FAMILY = VisionFamily(
    models={
        "Idefics3ForConditionalGeneration": "Idefics 3, SmolVLM 1",
        "SmolVLMForConditionalGeneration": "SmolVLM 2",
    },
    settings=("scale_factor",),
    spec=spec,
    gguf=(
        VisionGguf(
            projector="idefics3",
            architecture="Idefics3ForConditionalGeneration",
            texts=("llama",),
            image_token="<image>",
            settings=_gguf_settings,
        ),
    ),
)
