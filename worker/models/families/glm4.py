"""GLM-4-0414: half of each head rotates, in interleaved pairs; norms before and after each part."""

from dataclasses import replace
from typing import Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec, add_partially_rotated_heads
from worker.models.layout import LayerNorms

_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    attention_post=("post_self_attn_layernorm", "post_attention_norm"),
    mlp=("post_attention_layernorm", "ffn_norm"),
    mlp_post=("post_mlp_layernorm", "post_ffw_norm"),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` is for queries, keys and values."""
    from worker.models.common import attention_layers, decoder, gated_mlps, llama_attention

    attention = replace(
        llama_attention(config, head_dim=config.integer("head_dim", 128), rotary_fraction=0.5),
        qkv_bias=config.flag("attention_bias", True),
        interleaved_in=("safetensors", "gguf"),
    )
    layers = attention_layers(config, attention)
    return replace(
        decoder(config, layers, gated_mlps(config, stacked_gate_up=True)),
        norms=_NORMS,
        norm_eps=config.number("rms_norm_eps", 1.5625e-7),
    )


FAMILY = Family(
    models={"Glm4ForCausalLM": "GLM-4-0414"},
    model_types=("glm4",),
    spec=spec,
    gguf=Gguf(name="glm4", add_heads=add_partially_rotated_heads),
)
