"""GGUF files of towers over the grid of an image: settings and tensors as a folder has them.

llama.cpp's converter divides the product of a patch by its frames, and in the files of Qwen2-VL and
Qwen2.5-VL queries, keys and values. These are parts of a tensor (PART_MARK).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from worker.models.vision.spec import PART_MARK, TOWER, GgufSettings

IMAGE_TOKEN: Final = "<|image_pad|>"
MARKERS: Final = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""As `VisionGguf.markers`."""
MERGE: Final = 2
"""Patches of a side of a square, where a file does not say."""
_FRAMES: Final = 2
_LIMITS: Final = 8, 4096
"""Least and most rows of output of an image, where a file does not say: those of llama.cpp."""
_MLP: Final = ("ffn_gate", "ffn_up", "ffn_down")
_NAMES: Final = {
    "v.patch_embd.weight": f"patch_embed.proj.weight{PART_MARK}0",
    "v.patch_embd.weight.1": f"patch_embed.proj.weight{PART_MARK}1",
    "v.patch_embd.bias": "patch_embed.proj.bias",
    "v.position_embd.weight": "pos_embed.weight",
}
_LAYER_NAMES: Final = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
}
_QKV: Final = ("attn_q", "attn_k", "attn_v")
_MERGER: Final = ("v.post_ln", "mm.0", "mm.2")
_STACKED_NAMES: Final = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_NUMBERED: Final = re.compile(r"v\.(blk|deepstack)\.(\d{1,6})\.(\w+)\.(weight|bias)")


def grid_settings(
    vision: Mapping[str, Any],
    merge: int,
    processor: str,
    tower: Mapping[str, Any],
    mlp: Sequence[str],
    merger: Sequence[str],
    stacked_layers: Sequence[int] = (),
) -> GgufSettings:
    """Return the settings of a file.

    vision: its keys behind `clip.vision.`. processor: transformers' class for images and text.
    tower: further keys of vision_config. Other arguments as in GridSpec.
    """
    patch = vision["patch_size"]
    least, most = (rows * (patch * merge) ** 2 for rows in _LIMITS)
    return GgufSettings(
        projector={},
        images={
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch,
            "merge_size": merge,
            "temporal_patch_size": _FRAMES,
            "size": {
                "shortest_edge": vision.get("image_min_pixels", least),
                "longest_edge": vision.get("image_max_pixels", most),
            },
        },
        processor={"processor_class": processor},
        tower={
            "depth": vision["block_count"],
            "num_heads": vision["attention.head_count"],
            "spatial_merge_size": merge,
            "temporal_patch_size": _FRAMES,
            **tower,
        },
        tensor_name=_renaming(mlp, merger, stacked_layers),
    )


def _renaming(
    mlp: Sequence[str], merger: Sequence[str], stacked_layers: Sequence[int]
) -> Callable[[str], str | None]:
    """Return `GgufSettings.tensor_name`. The arguments are as in GridSpec."""
    of_layers = _LAYER_NAMES | dict(
        zip(_MLP[-len(mlp) :], (f"mlp.{each}" for each in mlp), strict=True)
    )
    of_merger = dict(zip(_MERGER, merger, strict=True))

    def name_in_tower(name: str) -> str | None:
        if name in _NAMES:
            return _NAMES[name]
        if (match := _NUMBERED.fullmatch(name)) is None:
            base, _, kind = name.rpartition(".")
            return f"merger.{of_merger[base]}.{kind}" if base in of_merger else None
        group, layer, part, kind = match[1], int(match[2]), match[3], match[4]
        if group == "deepstack":
            if layer not in stacked_layers or part not in _STACKED_NAMES:
                return None
            index = stacked_layers.index(layer)
            return f"deepstack_merger_list.{index}.{_STACKED_NAMES[part]}.{kind}"
        if part in _QKV:
            return f"blocks.{layer}.attn.qkv.{kind}{PART_MARK}{_QKV.index(part)}"
        return f"blocks.{layer}.{of_layers[part]}.{kind}" if part in of_layers else None

    def tensor_name(name: str) -> str | None:
        found = name_in_tower(name)
        return None if found is None else TOWER + found

    return tensor_name
