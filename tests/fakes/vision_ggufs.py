"""GGUF files of tiny models that read images of any size, as llama.cpp's converters write them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.fakes.tiny_families import with_tiled_heads
from tests.fakes.tiny_ggufs import place_in, rows_of
from tests.fakes.tiny_model_files import add_tokenizer
from tests.fakes.tiny_vision import GEMMA_PLACEHOLDER, IMAGE, VOCABULARY, chat_template
from worker.models.registry import spec_from_config

TEXTS: Final = {
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
"""Name in VISION_MODELS → architecture of the language model's file."""
_MARKERS: Final = {
    IMAGE: "<|image_pad|>",
    GEMMA_PLACEHOLDER: "<|vision_start|>",
    "<end_of_image>": "<|vision_end|>",
}
_FRAME: Final = (GEMMA_PLACEHOLDER, IMAGE, "<end_of_image>")
TOKENS: Final = tuple(_MARKERS.get(token, token) for token in VOCABULARY)
_SCALARS: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def write_language_model(name: str, model: Any, config: dict[str, Any], path: Path) -> None:
    """Write the language model of a model of transformers in float32.

    config: that of its prepared folder.
    """
    writer = gguf.GGUFWriter(path, TEXTS[name])
    rope = config["rope_parameters"]
    config = {"num_experts": config.get("num_local_experts"), **config}
    for key, own in _SCALARS.items():
        if (value := config.get(own)) is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{TEXTS[name]}.{key}", value)
    rotated = int(config.get("head_dim", 16) * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_freq_base(rope["rope_theta"])
    if TEXTS[name].startswith("qwen3vl"):
        writer.add_num_deepstack_layers(2)
    if "layer_types" in config and "linear_num_value_heads" in config:
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        writer.add_uint32(f"{TEXTS[name]}.ssm.inner_size", values)
        recurrent = [each == "linear_attention" for each in config["layer_types"]]
        writer.add_array(f"{TEXTS[name]}.attention.recurrent_layers", recurrent)
    add_tokenizer(writer, TOKENS)
    writer.add_bos_token_id(TOKENS.index("<s>"))
    writer.add_chat_template(chat_template("".join(_MARKERS[each] for each in _FRAME)))
    for own, numbers in _language_tensors(model, config).items():
        writer.add_tensor(own, numbers)
    _close(writer)


def _language_tensors(model: Any, config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of the language model by their names in a GGUF file.

    Of Qwen 3.5 llama.cpp stores the sum of 1 and the weight of a norm, and recurrent layers in an
    order and a shape of its own.
    """
    arrays = {
        own.replace("model.language_model.", "model."): weight.detach().numpy()
        for own, weight in model.state_dict().items()
    }
    if config["model_type"].startswith("qwen3_5"):
        config = config | {"of_llama_cpp": True}
        arrays = with_tiled_heads(arrays, model.config.text_config)
        for own, numbers in arrays.items():
            if own.endswith("conv1d.weight"):
                arrays[own] = numbers[:, 0]
            elif own.endswith("norm.weight") and ".linear_attn." not in own:
                arrays[own] = numbers + 1.0
    state = {own: torch.from_numpy(numbers) for own, numbers in arrays.items()}
    tensors: dict[str, NDArray[np.float32]] = {}
    for weight in spec_from_config(config).weights().values():
        place, stack = place_in(state, weight), weight.gguf_stack
        assert place is not None, weight.name
        if stack is None:
            tensors[weight.gguf] = place.numpy()
        else:
            whole = tensors.setdefault(stack.tensor, np.zeros(stack.shape, np.float32))
            rows_of(whole, stack, weight)[...] = place.detach().numpy()
    return tensors


def write_grid_mmproj(
    model: Path, path: Path, kind: str = "F32", swapped: bool = False, **changes: Any
) -> None:
    """Write the vision part of a saved model.

    kind: type of the matrices of layers. swapped: with the names of MLPs in older files.
    changes: keys of the metadata behind `clip.vision.`; None leaves one out.
    """
    config = json.loads((model / "config.json").read_text())
    tower, model_type = config["vision_config"], config["model_type"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    keys = {
        "image_size": 560,
        "patch_size": tower["patch_size"],
        "embedding_length": tower["hidden_size"],
        "feed_forward_length": tower["intermediate_size"],
        "block_count": tower["depth"],
        "attention.head_count": tower["num_heads"],
        "attention.layer_norm_epsilon": 1e-6,
        "projection_dim": config["text_config"]["hidden_size"],
    }
    if model_type == "qwen2_vl":
        writer.add_clip_projector_type("qwen2vl_merger")
        # The converter writes another size for that of the MLP.
        size, wrong = tower["embed_dim"], tower["hidden_size"]
        keys |= {"embedding_length": size, "feed_forward_length": wrong}
    elif model_type == "qwen2_5_vl":
        writer.add_clip_projector_type("qwen2.5vl_merger")
        writer.add_vision_use_silu(True)
        keys["n_wa_pattern"] = tower["fullatt_block_indexes"][0] + 1
    else:
        writer.add_clip_projector_type("qwen3vl_merger")
        writer.add_vision_use_gelu(True)
        side = round(tower["num_position_embeddings"] ** 0.5)
        keys |= {"image_size": side * tower["patch_size"], "spatial_merge_size": 2}
        stacked = tower.get("deepstack_visual_indexes", ())
        writer.add_vision_is_deepstack_layers([each in stacked for each in range(tower["depth"])])
    for key, value in (keys | changes).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        if value is not None:
            add(f"clip.vision.{key}", value)
    images = json.loads((model / "preprocessor_config.json").read_text())
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", images[key])
    for own, weight in load_file(model / "model.safetensors").items():
        if "visual." not in own:
            continue
        for name, part in _converted(own.partition("visual.")[2], weight.float(), tower):
            name = _swapped(name) if swapped else name
            numbers = part.contiguous().numpy()
            if ".blk." in name and numbers.ndim == 2:
                as_type = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(name, gguf.quants.quantize(numbers, as_type), raw_dtype=as_type)
            else:
                writer.add_tensor(name, numbers)
    _close(writer)


def _converted(
    name: str, weight: torch.Tensor, tower: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file for one of the tower, by its name behind `visual.`."""
    base, _, kind = name.rpartition(".")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, tower["depth"])
    if name == "patch_embed.proj.weight":
        yield "v.patch_embd.weight", weight[:, :, 0]
        yield "v.patch_embd.weight.1", weight[:, :, 1]
    elif base.endswith("attn.qkv") and tower["model_type"].startswith("qwen2"):
        for letter, rows in zip("qkv", weight.chunk(3), strict=True):
            own = names.get_name(f"visual.{base[:-3]}{letter}")
            yield f"{own}.{kind}", rows
    elif base.startswith("deepstack_merger_list."):
        _, index, part = base.split(".")
        layer = tower["deepstack_visual_indexes"][int(index)]
        yield f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{kind}", weight
    else:
        merger = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
        own = merger.get(base.removeprefix("merger.")) or names.get_name(f"visual.{base}")
        assert own is not None, name
        yield f"{own}.{kind}", weight


def _swapped(name: str) -> str:
    for old, new in ((".ffn_up.", ".ffn_down."), (".ffn_down.", ".ffn_up.")):
        if old in name:
            return name.replace(old, new)
    return name


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
