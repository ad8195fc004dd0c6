"""Tiny random models that wrap a language model, as transformers' own classes save them."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.fakes.tiny_model_files import TOKENS, tokenizer_json
from tests.fakes.tiny_transformers import random_model

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: Final[dict[str, Any]] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_attention_heads", "num_heads"), 2),
    **{"image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_output_dim": 32},
    **{"projector_input_dim": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
_DEFAULT_ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}
_MROPE: Final = {"rope_parameters": _DEFAULT_ROPE | {"mrope_section": [2, 3, 3]}}
_GEMMA4_VISION: Final = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
)
_KINDS: Final = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_LATENT: Final = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_PARTIAL_MROPE: Final = _DEFAULT_ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}
_LINEAR_ATTENTION: Final = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

WRAPPED: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        _KINDS
        | {"sliding_window": 7, "query_pre_attn_scalar": 24}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6},
        {},
    ),
    "mistral3": ("Mistral3ForConditionalGeneration", {}, {"tie_word_embeddings": False}),
    "ministral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "rope_parameters": _YARN},
        {},
    ),
    "llava": ("LlavaForConditionalGeneration", {}, {}),
    "aya_vision": ("AyaVisionForConditionalGeneration", _KINDS | {"sliding_window": 7}, {}),
    "cohere_compass": (
        "CohereCompassForConditionalGeneration",
        _KINDS
        | {
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": _DEFAULT_ROPE | {"mrope_section": [4, 2, 2]},
            },
        },
        {},
    ),
    "glm4v": ("Glm4vForConditionalGeneration", _MROPE, {}),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        _EXPERTS | {"n_routed_experts": 8, "rope_parameters": _PARTIAL_MROPE},
        {},
    ),
    "glm46v": ("Glm46VForConditionalGeneration", _MROPE, {}),
    "glm_ocr": ("GlmOcrForConditionalGeneration", _MROPE, {}),
    "idefics3": ("Idefics3ForConditionalGeneration", {}, {}),
    "internvl": ("InternVLForConditionalGeneration", {}, {"tie_word_embeddings": False}),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        _MROPE,
        {},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        _MROPE,
        {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {},
        {"tie_word_embeddings": True, "eos_token_id": 2},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        _EXPERTS | {"num_experts": 6},
        {"eos_token_id": 2},
    ),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", _LATENT, {"tie_word_embeddings": False}),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        _KINDS
        | {"sliding_window": 7, "global_head_dim": 32, "num_kv_shared_layers": 1}
        | {"vocab_size_per_layer_input": len(TOKENS), "hidden_size_per_layer_input": 8},
        {
            "vision_config": {
                **{"model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2},
                **{key: _VISION[key] for key in _GEMMA4_VISION},
            }
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_hidden_layers": 4},
        {},
    ),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", _LINEAR_ATTENTION, {}),
}
"""model_type (or a variation): class, settings of the language model, settings beside them."""
_SAVED_LAYERS: Final = r"^language_model\.model\.(blocks|encoder\.layers)\."
MOST_NUMBERS: Final = 30_000_000


def _wrapping_types() -> dict[str, str]:
    """Return the model types that wrap a language model, with their class."""
    found = {}
    for name in dir(modeling_auto):
        if not name.startswith("MODEL_FOR_") or not name.endswith("_MAPPING_NAMES"):
            continue
        for model_type, cls in getattr(modeling_auto, name).items():
            keys = CONFIG_MAPPING[model_type].sub_configs
            if "text_config" in keys and str(cls).endswith("ForConditionalGeneration"):
                found[model_type] = cls
    return dict(sorted(found.items()))


WRAPPING_TYPES: Final = _wrapping_types()


def default_json(model_type: str) -> dict[str, Any]:
    """Return the config.json of a model of this type with all defaults."""
    config = CONFIG_MAPPING[model_type]()
    text: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return text | {"architectures": [WRAPPING_TYPES[model_type]]}


def _described(name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return WRAPPED[name] if name in WRAPPED else (WRAPPING_TYPES[name], {}, {})


def wrapped_config(name: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a small model. changes: of its language model."""
    architecture, of_text, outside = _described(name)
    cls = getattr(transformers, architecture).config_class
    default = cls()
    text = default.get_text_config(decoder=True)
    model_type = of_text.get("model_type", text.model_type)
    known = CONFIG_MAPPING[model_type]().to_dict()
    of_text = {
        **{key: value for key, value in _TEXT.items() if key in known},
        **of_text,
        **changes,
        "model_type": model_type,
    }
    parts: dict[str, Any] = {"text_config": of_text}
    for key in cls.sub_configs:
        part = getattr(default, key, None)
        if key != "text_config" and part is not None:
            sizes = {k: value for k, value in _VISION.items() if k in part.to_dict()}
            parts[key] = {"model_type": part.model_type, **sizes}
    config: PretrainedConfig = cls(**parts | outside)
    return config


def save_wrapped(name: str, folder: Path, **changes: Any) -> Any:
    """Save a random model with a tokenizer; return it as transformers reads it, in float32.

    changes: of the settings of its language model. Raises what transformers raises for a
    configuration that is not possible, ValueError for a model that is not small.
    """
    cls = getattr(transformers, _described(name)[0])
    random_model(cls, wrapped_config(name, **changes), MOST_NUMBERS).save_pretrained(folder)
    # transformers saves some with other names of layers than the published folders have.
    rename_tensors(folder, partial(re.sub, _SAVED_LAYERS, "language_model.model.layers."))
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return read_wrapped(name, folder)


def read_wrapped(name: str, folder: Path) -> Any:
    """Return a saved model as transformers reads it, in float32."""
    cls = getattr(transformers, _described(name)[0])
    return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def rename_tensors(folder: Path, rename: Callable[[str], str]) -> None:
    """Change the names of all tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
