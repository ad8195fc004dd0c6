"""Bamba: most layers are Mamba-2 layers."""

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family
from worker.models.layout import LayerNorms, num_layers_of

if TYPE_CHECKING:
    from worker.models.spec import ModelSpec

FEED_FORWARD_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"), mlp=("pre_ff_layernorm", "ffn_norm")
)
FEED_FORWARD_NAMES: Final = (
    ("mlp.", "feed_forward."),
    ("model.norm.", "model.final_layernorm."),
)


def spec(config: ConfigReader) -> "ModelSpec":
    """Return the spec; the layers in `attn_layer_indices` have attention."""
    from worker.models.common import attention_layers, decoder, gated_mlps, llama_attention
    from worker.models.hybrids import Mamba2Keys, mamba2_mixer

    num_layers = num_layers_of(config)
    indices = config.get("attn_layer_indices")
    if not isinstance(indices, list) or not {*range(num_layers)} & {*indices}:
        raise config.refusal("attn_layer_indices", indices, "a list of layers is needed")
    bias = config.flag("attention_bias", False)
    attention = replace(
        llama_attention(config, rotary_fraction=0.5), qkv_bias=bias, output_bias=bias
    )
    config.must_be("attn_rotary_emb", attention.rotary_dim)
    mamba = mamba2_mixer(
        config,
        Mamba2Keys(),
        inner=config.integer("mamba_expand", 2) * config.integer("hidden_size"),
        eps=config.number("rms_norm_eps", 1e-5),
    )
    heads = attention_layers(config, attention, windows=[None] * num_layers)
    mixers = [heads[layer] if layer in indices else mamba for layer in range(num_layers)]
    return replace(
        decoder(config, mixers, gated_mlps(config)),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        norms=FEED_FORWARD_NORMS,
        hugging_face_names=FEED_FORWARD_NAMES,
    )


FAMILY = Family(models={"BambaForCausalLM": "Bamba"}, model_types=("bamba",), spec=spec)
