"""GLM-4 in transformers' form (glm-4-9b-chat-hf): GLM-4-0414 without the norms after parts."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    QUERY_BIAS,
    Family,
    Gguf,
    ModelSpec,
    add_partially_rotated_heads,
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` is for queries, keys and values."""
    from worker.models.common import attention_decoder, gated_mlps, llama_attention

    attention = replace(
        llama_attention(config, head_dim=config.integer("head_dim", 128), rotary_fraction=0.5),
        qkv_bias=config.flag("attention_bias", True),
        rope_interleaved_in=("safetensors", "gguf"),
    )
    mlps = gated_mlps(config, stacked_gate_up=True)
    return attention_decoder(config, attention, mlps=mlps, eps=1.5625e-7)


FAMILY = Family(
    models={"GlmForCausalLM": "GLM-4-9B in transformers' form"},
    model_types=("glm",),
    spec=spec,
    gguf=Gguf(
        name="chatglm",
        flags={"attention_bias": QUERY_BIAS},
        add_heads=add_partially_rotated_heads,
    ),
)
