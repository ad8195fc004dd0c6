"""Seed-OSS: Llama's layers with biases of their own for the inputs and the output of attention."""

from typing import Final

from worker.models.common import llama_like
from worker.models.config_reader import ConfigReader
from worker.models.spec import LayerNorms, ModelSpec

MODEL_TYPE = "seed_oss"
_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    mlp=("post_attention_layernorm", "post_attention_norm"),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` is for queries, keys and values."""
    return llama_like(
        config,
        architecture="SeedOssForCausalLM",
        head_dim=config.integer("head_dim", 128),
        attention={
            "qkv_bias": config.flag("attention_bias", True),
            "output_bias": config.flag("attention_out_bias", False),
        },
        norms=_NORMS,
    )
