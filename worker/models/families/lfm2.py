"""LFM2: most layers are gated short convolutions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    add_heads_of_width,
    layers_with_attention,
)
from worker.models.layout import CONV, FULL, LayerNorms, layer_kinds, num_layers_of

if TYPE_CHECKING:
    from worker.models.parts import PartSpec

_THETA: Final = 1_000_000.0
_NAMES: Final = (
    ("model.norm.", "model.embedding_norm."),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the size of the MLP is two thirds of the configured one, rounded up."""
    from worker.models.mlp import MlpSpec

    hidden_size = config.integer("hidden_size")
    key = "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim"
    config.get("intermediate_size")
    inner = config.integer(key)
    multiple = config.integer("block_multiple_of", 256)
    factor = config.number("block_ffn_dim_multiplier", 1.0)
    if config.flag("block_auto_adjust_ff_dim", True):
        inner = -(-int(factor * int(2 * inner / 3)) // multiple) * multiple
    for each in ("block_dim", "conv_dim", "conv_dim_out"):
        config.must_be(each, hidden_size)
    config.must_be("num_heads", config.integer("num_attention_heads"))
    config.must_be("block_norm_eps", config.number("norm_eps", 1e-5))
    for each in ("block_mlp_init_scale", "block_out_init_scale", "conv_use_xavier_init"):
        config.get(each)  # of the random weights that training begins with
    mlp = MlpSpec(hidden_size=hidden_size, intermediate_size=inner)
    return lfm2_decoder(config, [mlp] * num_layers_of(config))


def lfm2_decoder(config: ConfigReader, mlps: Sequence["PartSpec"]) -> ModelSpec:
    """Return the spec of a decoder.

    Without `layer_types`, layers that `full_attn_idxs` does not name have convolutions.
    """
    from worker.models.common import decoder, llama_attention
    from worker.models.hybrids import hybrid_mixers, short_conv_mixer
    from worker.models.rope import rope_from_config

    indices = config.get("full_attn_idxs")
    if indices is not None and not isinstance(indices, list):
        raise config.refusal("full_attn_idxs", indices, "a list of layers is needed")
    kinds = layer_kinds(
        config, (CONV, FULL), lambda layer: FULL if indices is None or layer in indices else CONV
    )
    rope = rope_from_config(config, config.integer("max_position_embeddings"), _THETA)
    attention = replace(llama_attention(config, rope=rope), qk_norm=True)
    config.must_be("hidden_act", "silu", "swish")
    mixers = hybrid_mixers(config, kinds, attention, short_conv_mixer(config))
    tied = config.flag("tie_word_embeddings", True)
    eps = config.number("norm_eps", 1e-5)
    config.get("rms_norm_eps")  # has no effect
    return replace(
        decoder(config, mixers, mlps),
        norm_eps=eps,
        norms=LayerNorms(attention=("operator_norm", "attn_norm"), mlp=("ffn_norm", "ffn_norm")),
        tied_embeddings=config.flag("tie_embedding", tied),
        hugging_face_names=_NAMES,
        gguf_names=(("output_norm.", "token_embd_norm."),),
    )


def finish_lfm2(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the kinds of layers; the size of the MLP is its own."""
    has_attention = layers_with_attention(config, metadata)
    config["layer_types"] = [FULL if each else CONV for each in has_attention]
    config["norm_eps"] = config.pop("rms_norm_eps", 1e-5)
    config["of_llama_cpp"] = True


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    finish_lfm2(config, metadata)
    config["block_auto_adjust_ff_dim"] = False


LFM2_KEYS: Final = {"shortconv.l_cache": "conv_L_cache"}

FAMILY = Family(
    models={"Lfm2ForCausalLM": "LFM2"},
    model_types=("lfm2",),
    spec=spec,
    gguf=Gguf(
        name="lfm2",
        keys=LFM2_KEYS,
        rope_theta=_THETA,
        add_heads=add_heads_of_width,
        finish=_finish,
    ),
)
