"""Tiny random models of transformers' causal language models, one for each model type."""

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES: Final[tuple[str, ...]] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST_NUMBERS: Final = 8_000_000
_NUM_LAYERS: Final = 4
_SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _NUM_LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "vocab_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}


_OF_TYPES: Final[dict[str, dict[str, Any]]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
            },
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cpmant": {"segment_types": 4, "prompt_types": 4, "prompt_length": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "max_seq_len": 128,
    },
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_unified_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gpt_neo": {
        "num_layers": _NUM_LAYERS,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 8,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {
        **dict.fromkeys(("shape_vocab_size", "pronunciation_vocab_size"), 128),
        **dict.fromkeys(("shape_embed_dim", "pronunciation_embed_dim"), 16),
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return a small configuration; raises what transformers raises for an impossible one."""
    cls = CONFIG_MAPPING[model_type]
    of_type = _OF_TYPES.get(model_type, {}) | changes
    try:
        default = cls()
    except Exception:  # some have no possible default
        default = cls(**of_type)

    def default_of(key: str) -> Any:
        try:
            return getattr(default, key, None)
        except Exception:  # keys whose values differ by layer cannot be read
            return None

    def is_derived(key: str) -> bool:
        return isinstance(getattr(cls, cls.attribute_map.get(key, key), None), property)

    keys: dict[str, Any] = {
        key: value
        for key, value in _SMALL.items()
        if default_of(key) is not None and not is_derived(key)
    }
    if hasattr(default, "pad_token_id"):
        keys["pad_token_id"] = 0
    if default_of("kv_lora_rank"):
        keys |= {"num_key_value_heads": 4, "head_dim": keys["qk_rope_head_dim"]}
    kinds = list(dict.fromkeys(default_of("layer_types") or ()))
    if kinds and not is_derived("layer_types"):
        keys["layer_types"] = [kinds[layer % len(kinds)] for layer in range(_NUM_LAYERS)]
    config = cls(**keys | of_type)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return config


def random_model(cls: Any, config: PretrainedConfig, most_numbers: int) -> Any:
    """Return a model of this class in float32; ValueError if it has more numbers than that."""
    with torch.device("meta"):
        numbers = sum(parameter.numel() for parameter in cls(config).parameters())
    if numbers > most_numbers:
        raise ValueError(f"its smallest configuration here has {numbers:,} numbers")
    torch.manual_seed(0)
    model = cls(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_tiny_transformers(model_type: str, folder: Path, **changes: Any) -> Any:
    """Save a random model and return it as transformers reads it."""
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    random_model(cls, tiny_config(model_type, **changes), MOST_NUMBERS).save_pretrained(folder)
    return cls.from_pretrained(folder, dtype=torch.float32).eval()
