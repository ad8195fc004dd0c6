"""Qwen2-VL and Qwen2.5-VL: images of any size, windows in most layers of the latter's tower."""

from worker.models.vision.grid_spec import GridSpec, layer_numbers, read_grid
from worker.models.vision.spec import VisionConfig, VisionFamily

_MERGER = ("ln_q", "mlp.0", "mlp.2")


def spec(config: VisionConfig) -> GridSpec:
    tower = config.tower
    if config.architecture == "Qwen2VLForConditionalGeneration":
        size = tower.integer("embed_dim")
        return read_grid(
            config,
            interleaved=False,
            norm="layer",
            mlp=("fc1", "fc2"),
            merger=_MERGER,
            patch_bias=False,
            size="embed_dim",
            output="hidden_size",
            intermediate=int(size * tower.number("mlp_ratio", 4)),
        )
    patch, merge = tower.integer("patch_size"), tower.integer("spatial_merge_size")
    window = tower.integer("window_size")
    if window < patch * merge:
        raise tower.refusal("window_size", window, f"at least {patch * merge} pixels are needed")
    return read_grid(
        config,
        interleaved=False,
        norm="rms",
        mlp=("gate_proj", "up_proj", "down_proj"),
        merger=_MERGER,
        patch_bias=False,
        window=window // merge // patch * merge,
        full_layers=layer_numbers(tower, "fullatt_block_indexes"),
    )


FAMILY = VisionFamily(
    models={
        "Qwen2VLForConditionalGeneration": "Qwen2-VL",
        "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    },
    settings=("vision_start_token_id", "vision_end_token_id"),
    spec=spec,
)
