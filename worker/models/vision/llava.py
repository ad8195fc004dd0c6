"""LLaVA 1.5 and models of that architecture: CLIP or SigLIP, and two products for each patch."""

from worker.models.vision.spec import (
    VisionConfig,
    VisionFamily,
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
    is_clip = config.tower.get("model_type") == "clip_vision_model"
    tower = read_tower(config.tower, has_class_token=is_clip)
    strategy = "vision_feature_select_strategy"
    settings.must_be(strategy, "default", "full")
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


FAMILY = VisionFamily(
    models={"LlavaForConditionalGeneration": "LLaVA 1.5 and others with CLIP or SigLIP"},
    tower_types=("clip_vision_model", "siglip_vision_model"),
    settings=(
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "projector_hidden_act",
        "multimodal_projector_bias",
    ),
    spec=spec,
)
