"""Qwen3-VL with DeepStack, and Qwen 3.5 without: images of any size, a table of positions."""

import math

from worker.models.vision.grid_spec import GridSpec, layer_numbers, read_grid
from worker.models.vision.spec import VisionConfig, VisionFamily

_WITH_DEEPSTACK = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")


def spec(config: VisionConfig) -> GridSpec:
    """Return the spec; the layers of DeepStack come in the order of the tower."""
    tower = config.tower
    positions = tower.integer("num_position_embeddings", most=1 << 24)
    side = math.isqrt(positions)
    if side * side != positions:
        raise tower.refusal("num_position_embeddings", positions, "a square is needed")
    stacked: tuple[int, ...] = ()
    if config.architecture in _WITH_DEEPSTACK:
        stacked = layer_numbers(tower, "deepstack_visual_indexes")
        num_layers = config.text.integer("num_hidden_layers")
        if list(stacked) != sorted({*stacked}) or len(stacked) > num_layers:
            reason = f"ascending numbers are needed, at most {num_layers}"
            raise tower.refusal("deepstack_visual_indexes", list(stacked), reason)
    return read_grid(
        config,
        interleaved=True,
        norm="layer",
        mlp=("linear_fc1", "linear_fc2"),
        merger=("norm", "linear_fc1", "linear_fc2"),
        patch_bias=True,
        position_side=side,
        stacked_layers=stacked,
    )


FAMILY = VisionFamily(
    models={
        "Qwen3VLForConditionalGeneration": "Qwen3-VL",
        "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL with experts",
        "Qwen3_5ForConditionalGeneration": "Qwen 3.5",
        "Qwen3_5MoeForConditionalGeneration": "Qwen 3.5 with experts",
    },
    settings=("vision_start_token_id", "vision_end_token_id"),
    spec=spec,
)
