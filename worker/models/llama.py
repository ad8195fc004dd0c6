"""Llama (1, 2, 3, 3.x, SmolLM2 and other models of that architecture)."""

from worker.models.common import llama_like
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "llama"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` gives all four projections of the attention a bias."""
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="LlamaForCausalLM",
        attention={"qkv_bias": bias, "output_bias": bias, "interleaved_in": ("gguf",)},
    )
