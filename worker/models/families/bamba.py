"""Bamba: most layers are Mamba-2 layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    MAMBA2_KEYS,
    ROTATES,
    VALUES_OF_ALL_HEADS,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    add_mamba_expansion,
    add_partially_rotated_heads,
    layers_with_attention,
)
from worker.models.families.granite import GRANITE_KEYS
from worker.models.layout import LayerNorms, num_layers_of

FEED_FORWARD_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"), mlp=("pre_ff_layernorm", "ffn_norm")
)
FEED_FORWARD_NAMES: Final = (("mlp.", "feed_forward."), ("model.norm.", "model.final_layernorm."))


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the layers in `attn_layer_indices` have attention."""
    from worker.models.common import attention_layers, decoder, gated_mlps, llama_attention
    from worker.models.hybrids import Mamba2Keys, mamba2_mixer

    num_layers = num_layers_of(config)
    indices = config.get("attn_layer_indices")
    if not isinstance(indices, list) or not {*range(num_layers)} & {*indices}:
        raise config.refusal("attn_layer_indices", indices, "a list of layers is needed")
    attention = replace(
        llama_attention(config, rotary_fraction=0.5, bias=config.flag("attention_bias", False)),
        rope_interleaved_in=("gguf",),
        interleaves_all=True,
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
        decoder(config, mixers, gated_mlps(config), eps=1e-5),
        norms=FEED_FORWARD_NORMS,
        hugging_face_names=FEED_FORWARD_NAMES,
    )


def _is_bamba(keys: Mapping[str, Any]) -> bool:
    """Return whether a file that calls itself a Granite hybrid is of Bamba.

    Its queries and keys rotate, and it has none of Granite's factors.
    """
    return bool(keys.get(ROTATES)) and GRANITE_KEYS.keys().isdisjoint(keys)


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the layers with attention and the channels of Mamba-2 layers."""
    has_attention = layers_with_attention(config, metadata)
    config["attn_layer_indices"] = [layer for layer, each in enumerate(has_attention) if each]
    add_mamba_expansion(config, metadata)
    config["of_llama_cpp"] = True


FAMILY = Family(
    models={"BambaForCausalLM": "Bamba"},
    model_types=("bamba",),
    spec=spec,
    gguf=Gguf(
        name="granitehybrid",
        is_marked=_is_bamba,
        keys=MAMBA2_KEYS,
        other_keys=(VALUES_OF_ALL_HEADS,),
        add_heads=add_partially_rotated_heads,
        finish=_finish,
    ),
)
