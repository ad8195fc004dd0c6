"""Tiny random checkpoints of every family, made by transformers from a configuration."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}

_WINDOW = {"sliding_window": 7}
_GEMMA3: dict[str, Any] = _SIZES | {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    **_WINDOW,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3TextConfig(**_GEMMA3),
    "gemma3-pattern-untied": Gemma3TextConfig(
        **_GEMMA3 | {"layer_types": None, "sliding_window_pattern": 2},
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma3-linear": Gemma3TextConfig(
        **_GEMMA3,
        rope_parameters={
            "full_attention": _LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama": LlamaConfig(**_SIZES),
    "llama-tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**_SIZES, attention_bias=True),
    "llama-llama3": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "llama-linear": LlamaConfig(**_SIZES, rope_parameters=_LINEAR),
    "llama-one-kv-head": LlamaConfig(**_SIZES | {"num_key_value_heads": 1}),
    "mistral": MistralConfig(**_SIZES, sliding_window=None),
    "mistral-wide-heads": MistralConfig(**_SIZES, sliding_window=None, head_dim=24),
    "mistral-window": MistralConfig(**_SIZES, **_WINDOW),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen2-window": Qwen2Config(**_SIZES, **_WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen2-tied-yarn": Qwen2Config(**_SIZES, tie_word_embeddings=True, rope_parameters=_YARN),
    "qwen2-yarn-mscale": Qwen2Config(
        **_SIZES,
        rope_parameters=_YARN
        | {"mscale": 1.5, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    "qwen2-yarn-fractional": Qwen2Config(
        **_SIZES, rope_parameters=_YARN | {"truncate": False, "attention_factor": 0.8}
    ),
    "qwen3": Qwen3Config(**_SIZES, head_dim=32),
    "qwen3-window": Qwen3Config(
        **_SIZES, **_WINDOW, head_dim=32, use_sliding_window=True, max_window_layers=0
    ),
    "qwen3-biases-tied": Qwen3Config(
        **_SIZES, head_dim=48, attention_bias=True, tie_word_embeddings=True
    ),
}
"""Every family with every variation of the arithmetic that it supports."""


def tiny_model(config: PretrainedConfig, seed: int = 0) -> Any:
    """Return a transformers model in which every weight, norm and bias affects the logits."""
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)
    return model


def save_tiny(name: str, folder: Path, **options: Any) -> Any:
    """Create the model of a configuration and save it as a checkpoint in `folder`."""
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(folder, **options)
    return model
