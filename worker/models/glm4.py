"""GLM-4-0414: half of each head rotates, in interleaved pairs; norms before and after each part."""

from typing import Final

from worker.models.common import llama_like
from worker.models.config_reader import ConfigReader
from worker.models.spec import LayerNorms, ModelSpec

MODEL_TYPE = "glm4"
_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    attention_post=("post_self_attn_layernorm", "post_attention_norm"),
    mlp=("post_attention_layernorm", "ffn_norm"),
    mlp_post=("post_mlp_layernorm", "post_ffw_norm"),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` is for queries, keys and values."""
    return llama_like(
        config,
        architecture="Glm4ForCausalLM",
        head_dim=config.integer("head_dim", 128),
        partial_rotary_factor=0.5,
        attention={
            "qkv_bias": config.flag("attention_bias", True),
            "interleaved_in": ("safetensors", "gguf"),
        },
        stacked_gate_up=True,
        norms=_NORMS,
        norm_eps=config.number("rms_norm_eps", 1.5625e-7),
    )
