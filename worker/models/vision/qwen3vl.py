"""Qwen3-VL with DeepStack, and Qwen 3.5 without: images of any size, a table of positions."""

import math
from collections.abc import Mapping
from typing import Any

from proto.errors import ModelError, shown
from worker.models.vision.grid_gguf import IMAGE_TOKEN, MARKERS, MERGE, grid_settings
from worker.models.vision.grid_spec import GridSpec, layer_numbers, read_grid
from worker.models.vision.spec import GgufSettings, VisionConfig, VisionFamily, VisionGguf

_MLP = ("linear_fc1", "linear_fc2")
_MERGER = ("norm", *_MLP)
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
        mlp=_MLP,
        merger=_MERGER,
        patch_bias=True,
        position_side=side,
        stacked_layers=stacked,
    )


def _gguf_settings(vision: Mapping[str, Any], side: int, merge: int) -> GgufSettings:
    flags = vision.get("is_deepstack_layers", [])
    if not isinstance(flags, list):
        raise ModelError(f"clip.vision.is_deepstack_layers = {shown(repr(flags))}")
    stacked = [layer for layer, is_stacked in enumerate(flags) if is_stacked]
    tower = {
        "out_hidden_size": vision["projection_dim"],
        "intermediate_size": vision["feed_forward_length"],
        "num_position_embeddings": side * side,
        "deepstack_visual_indexes": stacked,
    }
    return grid_settings(vision, merge, "Qwen3VLProcessor", tower, _MLP, _MERGER, stacked)


FAMILY = VisionFamily(
    models={
        "Qwen3VLForConditionalGeneration": "Qwen3-VL",
        "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL with experts",
        "Qwen3_5ForConditionalGeneration": "Qwen 3.5",
        "Qwen3_5MoeForConditionalGeneration": "Qwen 3.5 with experts",
    },
    settings=("vision_start_token_id", "vision_end_token_id"),
    spec=spec,
    gguf=tuple(
        VisionGguf(
            projector="qwen3vl_merger",
            architecture=architecture,
            texts=(text,),
            image_token=IMAGE_TOKEN,
            settings=_gguf_settings,
            merge=MERGE,
            markers=MARKERS,
        )
        for text, architecture in (
            ("qwen3vl", "Qwen3VLForConditionalGeneration"),
            ("qwen3vlmoe", "Qwen3VLMoeForConditionalGeneration"),
            ("qwen35", "Qwen3_5ForConditionalGeneration"),
            ("qwen35moe", "Qwen3_5MoeForConditionalGeneration"),
        )
    ),
)
