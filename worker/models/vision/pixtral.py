"""The tower of Pixtral, and Mistral 3 (Mistral Small 3.1 and 3.2, Ministral 3), which merges its
patches: an image is a tile of its own proportions, with rotary positions.

Pixtral itself has the architecture of LLaVA (llava.py).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from proto.errors import ModelError, shown
from worker.models.config_reader import ConfigReader
from worker.models.vision.spec import (
    GgufSettings,
    VisionConfig,
    VisionFamily,
    VisionGguf,
    read_activation,
)
from worker.models.vision.tile_spec import (
    MlpProjector,
    PatchMerge,
    TileSpec,
    TowerRope,
    TowerSpec,
    feature_layers,
    read_tower,
)

TOWER_TYPE: Final = "pixtral"
TENSOR_NAMES: Final = {
    r"patch_conv\.": "embeddings.patch_embedding.",
    r"ln_pre\.": "pre_layrnorm.",
    r"transformer\.layers\.(\d+)\.attention_norm\.": r"encoder.layers.\1.layer_norm1.",
    r"transformer\.layers\.(\d+)\.ffn_norm\.": r"encoder.layers.\1.layer_norm2.",
    r"transformer\.layers\.(\d+)\.attention\.o_proj\.": r"encoder.layers.\1.self_attn.out_proj.",
    r"transformer\.layers\.(\d+)\.attention\.": r"encoder.layers.\1.self_attn.",
    r"transformer\.layers\.(\d+)\.feed_forward\.gate_proj\.": r"encoder.layers.\1.mlp.gate.",
    r"transformer\.layers\.(\d+)\.feed_forward\.up_proj\.": r"encoder.layers.\1.mlp.fc1.",
    r"transformer\.layers\.(\d+)\.feed_forward\.down_proj\.": r"encoder.layers.\1.mlp.fc2.",
}
"""As `VisionFamily.tensor_names`."""
IMAGE_TOKEN: Final = "[IMG]"
GGUF_TEXTS: Final = ("llama", "mistral3")
"""As `VisionGguf.texts`: older and newer converters name Mistral's language models so."""
_LARGEST: Final = 1 << 14
_LONGEST: Final = 1024
"""Pixels of the longest side where the image processor's settings leave it out."""


def read_pixtral_tower(config: VisionConfig, scale: int) -> TowerSpec:
    """Return the tower of a configuration for images that the image processor makes.

    scale: patches of a side of the square that becomes a row of output. Raises ModelError for sizes
    that do not fit each other, and for what is not supported.
    """
    tower = read_tower(config.tower)
    if tower.activation not in ("silu", "gelu", "gelu_tanh"):
        raise config.tower.refusal("hidden_act", tower.activation, "the MLP has a gate")
    if tower.head_dim % 4:
        reason = f"a head has {tower.head_dim} numbers, a multiple of 4 is needed"
        raise config.tower.refusal("num_attention_heads", tower.num_heads, reason)
    rope = ConfigReader(config.tower.mapping("rope_parameters"), "vision_config: rope_parameters")
    rope.must_be("rope_type", "axial", "default")
    side = scale * tower.patch_size
    return replace(
        tower,
        image_size=-(-_longest_side(config.images) // side) * side,
        norm_eps=config.tower.number("layer_norm_eps", 1e-5),
        has_first_norm=True,
        has_patch_bias=False,
        has_biases=False,
        has_rms_norms=True,
        is_gated=True,
        rope=TowerRope(
            theta=rope.number("rope_theta", 10000.0), alternates=True, interleaved_in=("gguf",)
        ),
    )


def _longest_side(images: ConfigReader) -> int:
    """Return the most pixels of a side of an image, before it is filled up to whole patches."""
    size = images.mapping("size")
    if not size:
        return _LONGEST
    keys = ("longest_edge",) if size.get("longest_edge") else ("height", "width")
    longest = 0
    for key in keys:
        value = size.get(key)
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise ModelError(f"preprocessor_config.json: size = {shown(repr(dict(size)))}")
        longest = max(longest, value)
    return longest


def gguf_settings(
    vision: Mapping[str, Any], projector: Mapping[str, Any], merge: int
) -> GgufSettings:
    """Return the settings of a GGUF file as the published folders have them.

    vision: its keys behind `clip.vision.`. projector: settings beside the tower. merge: patches of
    a side that become one row.
    """
    patch = vision["patch_size"]
    return GgufSettings(
        projector={"vision_feature_layer": -1, "projector_hidden_act": "gelu", **projector},
        images={
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": patch, "width": patch},
            "size": {"longest_edge": vision["image_size"]},
        },
        processor={
            "processor_class": "PixtralProcessor",
            "image_token": IMAGE_TOKEN,
            "patch_size": patch,
            "spatial_merge_size": merge,
        },
        tower={"model_type": TOWER_TYPE},
    )


def is_merged(tensors: Collection[str]) -> bool:
    """Return whether a GGUF file with these tensors is of Mistral 3, not of Pixtral."""
    return "mm.patch_merger.weight" in tensors


def _gguf_settings(vision: Mapping[str, Any], side: int, scale: int) -> GgufSettings:
    return gguf_settings(vision, {"spatial_merge_size": scale}, scale)


def spec(config: VisionConfig) -> TileSpec:
    """Return the spec of Mistral 3."""
    settings = config.settings
    scale = settings.integer("spatial_merge_size", most=64)
    tower = read_pixtral_tower(config, scale)
    layers = feature_layers(settings, "vision_feature_layer", tower.num_layers, default=-1)
    if len(layers) > 1:
        raise settings.refusal("vision_feature_layer", list(layers), "one layer is supported")
    return TileSpec(
        architecture=config.architecture,
        tower=tower,
        projector=MlpProjector(
            feature_layers=layers,
            drops_first_token=False,
            activation=read_activation(settings, "projector_hidden_act"),
            bias=settings.flag("multimodal_projector_bias", False),
            merge=PatchMerge(scale=scale, norm_eps=config.text.number("rms_norm_eps", 1e-5)),
        ),
        output_size=config.output_size,
    )


FAMILY = VisionFamily(
    models={"Mistral3ForConditionalGeneration": "Mistral Small 3.1 and 3.2, Ministral 3"},
    tower_types=(TOWER_TYPE,),
    settings=(
        "spatial_merge_size",
        "vision_feature_layer",
        "projector_hidden_act",
        "multimodal_projector_bias",
    ),
    spec=spec,
    tensor_names=TENSOR_NAMES,
    gguf=(
        VisionGguf(
            projector="pixtral",
            architecture="Mistral3ForConditionalGeneration",
            texts=GGUF_TEXTS,
            image_token=IMAGE_TOKEN,
            settings=_gguf_settings,
            is_marked=is_merged,
        ),
    ),
)
