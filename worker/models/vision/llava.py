"""LLaVA 1.5 and models of that architecture: CLIP, SigLIP or Pixtral's tower, and two products for
each patch.
"""

from collections.abc import Collection, Mapping
from typing import Any

from worker.models.vision import pixtral
from worker.models.vision.spec import (
    GgufSettings,
    VisionConfig,
    VisionFamily,
    VisionGguf,
    read_activation,
)
from worker.models.vision.tile_spec import (
    MlpProjector,
    TileSpec,
    feature_layers,
    read_tower,
)


def spec(config: VisionConfig) -> TileSpec:
    """Return the spec; by default the projector reads the residual before the last layer."""
    settings = config.settings
    tower_type = config.tower.get("model_type")
    is_pixtral = tower_type == pixtral.TOWER_TYPE
    if is_pixtral:
        tower = pixtral.read_pixtral_tower(config, scale=1)
    else:
        tower = read_tower(config.tower, has_class_token=tower_type == "clip_vision_model")
    strategy = "vision_feature_select_strategy"
    settings.must_be(strategy, *(("full",) if is_pixtral else ("default", "full")))
    return TileSpec(
        architecture=config.architecture,
        tower=tower,
        projector=MlpProjector(
            feature_layers=feature_layers(
                settings, "vision_feature_layer", tower.num_layers, default=-2
            ),
            drops_first_token=settings.get(strategy) != "full",
            activation=read_activation(settings, "projector_hidden_act"),
            bias=settings.flag("multimodal_projector_bias", True),
        ),
        output_size=config.output_size,
    )


def _clip_settings(vision: Mapping[str, Any], side: int, scale: int) -> GgufSettings:
    """Return the settings of LLaVA 1.5. Files leave out the layers that are not read."""
    size, strategy = vision["image_size"], "default"
    return GgufSettings(
        projector={
            "vision_feature_layer": vision.get("feature_layer", vision["block_count"]),
            "vision_feature_select_strategy": strategy,
            "projector_hidden_act": "gelu",
        },
        images={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": size},
            "crop_size": {"height": size, "width": size},
        },
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": vision["patch_size"],
            "vision_feature_select_strategy": strategy,
            "num_additional_image_tokens": 1,
        },
        tower={"model_type": "clip_vision_model"},
    )


def _is_clip(tensors: Collection[str]) -> bool:
    """Return whether a GGUF file is of LLaVA 1.5, without norms in its projector, and tiles."""
    others = ("mm.3.weight", "model.image_newline", "v.image_newline")
    return "v.class_embd" in tensors and not any(each in tensors for each in others)


def _pixtral_settings(vision: Mapping[str, Any], side: int, scale: int) -> GgufSettings:
    return pixtral.gguf_settings(vision, {"vision_feature_select_strategy": "full"}, merge=1)


def _is_pixtral(tensors: Collection[str]) -> bool:
    return not pixtral.is_merged(tensors)


FAMILY = VisionFamily(
    models={"LlavaForConditionalGeneration": "LLaVA 1.5 and others with CLIP or SigLIP, Pixtral"},
    tower_types=("clip_vision_model", "siglip_vision_model", pixtral.TOWER_TYPE),
    settings=(
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "projector_hidden_act",
        "multimodal_projector_bias",
    ),
    spec=spec,
    tensor_names=pixtral.TENSOR_NAMES,
    gguf=(
        VisionGguf(
            projector="mlp",
            architecture="LlavaForConditionalGeneration",
            texts=("llama",),
            image_token="<image>",
            settings=_clip_settings,
            is_marked=_is_clip,
        ),
        VisionGguf(
            projector="pixtral",
            architecture="LlavaForConditionalGeneration",
            texts=pixtral.GGUF_TEXTS,
            image_token=pixtral.IMAGE_TOKEN,
            settings=_pixtral_settings,
            is_marked=_is_pixtral,
        ),
    ),
)
