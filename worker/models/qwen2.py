"""Qwen2 and Qwen2.5: biases on query, key and value, none on the output projection."""

from worker.models.common import llama_like, windows_of_upper_layers
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "qwen2"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `sliding_window` counts only if `use_sliding_window` is set."""
    return llama_like(
        config,
        architecture="Qwen2ForCausalLM",
        windows=windows_of_upper_layers(config),
        attention={"qkv_bias": True},
    )
