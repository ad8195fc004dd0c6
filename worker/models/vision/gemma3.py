"""Gemma 3 from 4B: SigLIP, whose patches are pooled; tokens of an image see each other."""

import math
from collections.abc import Mapping
from typing import Any

from worker.models.vision.spec import (
    GgufSettings,
    VisionConfig,
    VisionFamily,
    VisionGguf,
)
from worker.models.vision.tile_spec import (
    PoolProjector,
    TileSpec,
    read_tower,
)


def spec(config: VisionConfig) -> TileSpec:
    tower = read_tower(config.tower)
    tokens = config.settings.integer("mm_tokens_per_image", 256)
    side = math.isqrt(tokens)
    if side * side != tokens or tower.side % side:
        reason = f"the square of a divisor of {tower.side}, the patches of a side, is needed"
        raise config.settings.refusal("mm_tokens_per_image", tokens, reason)
    return TileSpec(
        architecture=config.architecture,
        tower=tower,
        projector=PoolProjector(scale=tower.side // side),
        output_size=config.output_size,
        max_tiles=_max_tiles(config),
        is_bidirectional=True,
    )


def _max_tiles(config: VisionConfig) -> int:
    """Return the image and its crops, if the image processor makes some."""
    if not config.images.flag("do_pan_and_scan", False):
        return 1
    return 1 + config.images.integer("pan_and_scan_max_num_crops", 4)


def _gguf_settings(vision: Mapping[str, Any], side: int, scale: int) -> GgufSettings:
    tokens, size = (side // scale) ** 2, vision["image_size"]
    return GgufSettings(
        projector={"mm_tokens_per_image": tokens},
        images={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": size, "width": size},
        },
        processor={"processor_class": "Gemma3Processor", "image_seq_length": tokens},
    )


FAMILY = VisionFamily(
    models={"Gemma3ForConditionalGeneration": "Gemma 3 from 4B"},
    tower_types=("siglip_vision_model",),
    settings=("mm_tokens_per_image",),
    spec=spec,
    gguf=(
        VisionGguf(
            projector="gemma3",
            architecture="Gemma3ForConditionalGeneration",
            texts=("gemma3",),
            image_token="<image_soft_token>",
            settings=_gguf_settings,
        ),
    ),
)
