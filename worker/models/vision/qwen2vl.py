"""Qwen2-VL and Qwen2.5-VL: images of any size, windows in most layers of the latter's tower."""

from collections.abc import Mapping
from typing import Any

from proto.errors import ModelError, shown
from worker.models.vision.grid_gguf import IMAGE_TOKEN, MARKERS, MERGE, grid_settings
from worker.models.vision.grid_spec import GridSpec, layer_numbers, read_grid
from worker.models.vision.spec import GgufSettings, VisionConfig, VisionFamily, VisionGguf

_MERGER = ("ln_q", "mlp.0", "mlp.2")
_MLP = ("fc1", "fc2")
_GATED_MLP = ("gate_proj", "up_proj", "down_proj")
_GGUF_WINDOW = 112
"""Pixels of a side of a window, where a GGUF file does not say."""


def spec(config: VisionConfig) -> GridSpec:
    tower = config.tower
    if config.architecture == "Qwen2VLForConditionalGeneration":
        size = tower.integer("embed_dim")
        return read_grid(
            config,
            interleaved=False,
            norm="layer",
            mlp=_MLP,
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
        mlp=_GATED_MLP,
        merger=_MERGER,
        patch_bias=False,
        window=window // merge // patch * merge,
        full_layers=layer_numbers(tower, "fullatt_block_indexes"),
    )


def _gguf_settings(vision: Mapping[str, Any], side: int, merge: int) -> GgufSettings:
    """Return the settings of Qwen2-VL."""
    size = vision["embedding_length"]
    tower = {
        "embed_dim": size,
        "hidden_size": vision["projection_dim"],
        "mlp_ratio": vision["feed_forward_length"] / size,
    }
    return grid_settings(vision, merge, "Qwen2VLProcessor", tower, _MLP, _MERGER)


def _window_settings(vision: Mapping[str, Any], side: int, merge: int) -> GgufSettings:
    """Return the settings of Qwen2.5-VL. Every n-th layer has no windows."""
    pattern, depth = vision.get("n_wa_pattern"), vision["block_count"]
    if type(pattern) is not int or pattern < 0:
        raise ModelError(f"clip.vision.n_wa_pattern = {shown(repr(pattern))}")
    tower = {
        "out_hidden_size": vision["projection_dim"],
        "intermediate_size": vision["feed_forward_length"],
        "window_size": vision.get("window_size", _GGUF_WINDOW),
        "fullatt_block_indexes": list(range(max(pattern, 1) - 1, depth, max(pattern, 1))),
    }
    return grid_settings(vision, merge, "Qwen2_5_VLProcessor", tower, _GATED_MLP, _MERGER)


FAMILY = VisionFamily(
    models={
        "Qwen2VLForConditionalGeneration": "Qwen2-VL",
        "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    },
    settings=("vision_start_token_id", "vision_end_token_id"),
    spec=spec,
    gguf=tuple(
        VisionGguf(
            projector=projector,
            architecture=architecture,
            texts=("qwen2vl",),
            image_token=IMAGE_TOKEN,
            settings=settings,
            merge=MERGE,
            markers=MARKERS,
        )
        for projector, architecture, settings in (
            ("qwen2vl_merger", "Qwen2VLForConditionalGeneration", _gguf_settings),
            ("qwen2.5vl_merger", "Qwen2_5_VLForConditionalGeneration", _window_settings),
        )
    ),
)
