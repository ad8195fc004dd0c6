"""GLM-4 in transformers' form (glm-4-9b-chat-hf): GLM-4-0414 without the norms after parts."""

from worker.models.common import llama_like
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "glm"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` is for queries, keys and values."""
    return llama_like(
        config,
        architecture="GlmForCausalLM",
        head_dim=config.integer("head_dim", 128),
        partial_rotary_factor=0.5,
        attention={
            "qkv_bias": config.flag("attention_bias", True),
            "interleaved_in": ("safetensors", "gguf"),
        },
        stacked_gate_up=True,
        norm_eps=config.number("rms_norm_eps", 1.5625e-7),
    )
