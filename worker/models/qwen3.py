"""Qwen3: an RMSNorm over every query and key head, and heads of 128 by default."""

from worker.models.common import llama_like, windows_of_upper_layers
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "qwen3"
_DEFAULT_HEAD_DIM = 128


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `sliding_window` counts only if `use_sliding_window` is set."""
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="Qwen3ForCausalLM",
        head_dim=config.integer("head_dim", _DEFAULT_HEAD_DIM),
        windows=windows_of_upper_layers(config),
        attention={"qkv_bias": bias, "output_bias": bias, "qk_norm": True},
    )
