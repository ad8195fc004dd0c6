"""ModernBERT (Warner et al., 2024): rotary positions, gated MLPs, windows in most layers."""

from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DEFAULT_THETA,
    NORM_EPS,
    WINDOW,
    WINDOW_PATTERN,
    WINDOWED_BASE,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
)
from worker.models.layout import FULL, WINDOWED, LayerNorms, layer_windows, window_kinds
from worker.models.rope import KindOfRope, ropes_by_kind

_NORMS: Final = LayerNorms(attention=("attn_norm", "attn_norm"), mlp=("mlp_norm", "ffn_norm"))
_NAMES: Final = (
    ("model.embed_tokens.", "model.embeddings.tok_embeddings."),
    ("model.input_norm.", "model.embeddings.norm."),
    ("model.norm.", "model.final_norm."),
    (".self_attn.qkv_proj.", ".attn.Wqkv."),
    (".self_attn.o_proj.", ".attn.Wo."),
    (".mlp.gate_up_proj.", ".mlp.Wi."),
    (".mlp.down_proj.", ".mlp.Wo."),
)
_THETA: Final = 160_000.0
_ROPES: Final = (
    KindOfRope(FULL, "global_rope_theta", _THETA, scaled=True),
    KindOfRope(WINDOWED, "local_rope_theta", DEFAULT_THETA, scaled=True),
)
_HEAD_KEYS: Final = (
    *("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias"),
    *("sparse_pred_ignore_index", "initializer_cutoff_factor", "deterministic_flash_attn"),
    *("tie_word_embeddings", "reference_compile"),
    *("repad_logits_with_grad", "layer_norm_eps"),
)
"""Keys that change no layer: those of heads, which the pooler reads, of training, and an older
name that nothing reads."""


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `local_attention` is the window to both sides together."""
    from worker.models.common import ACTIVATIONS, bidirectional_attention
    from worker.models.mlp import MlpSpec
    from worker.models.spec import InputSpec, LayerSpec, ModelSpec

    for key in _HEAD_KEYS:
        config.get(key)
    hidden_size, length = config.integer("hidden_size"), config.integer("max_position_embeddings")
    interval = config.integer("global_attn_every_n_layers", 3)
    window = config.integer("local_attention", 128) // 2 + 1
    kinds = window_kinds(config, window, lambda layer: layer % interval != 0)
    config.get("sliding_window")  # repeats half of local_attention
    windows = layer_windows(config, kinds, window)
    ropes = ropes_by_kind(config, _ROPES, length)
    config.must_be("hidden_activation", *ACTIVATIONS)
    bias = config.flag("attention_bias", False)
    attention = replace(
        bidirectional_attention(config, ropes[FULL]),
        stacked_qkv=True,
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = MlpSpec(
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        activation=ACTIVATIONS[config.get("hidden_activation") or "gelu"],
        bias=config.flag("mlp_bias", False),
        stacked_gate_up=True,
    )
    return ModelSpec(
        architecture="ModernBertModel",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position=length,
        norm_eps=config.number("norm_eps", 1e-5),
        layers=tuple(
            LayerSpec(mixer=replace(attention, rope=ropes[kind], window=window), mlp=mlp)
            for kind, window in zip(kinds, windows, strict=True)
        ),
        inputs=InputSpec(),
        norms=_NORMS,
        skips_first_norm=True,
        norm_type="layer",
        norm_bias=config.flag("norm_bias", False),
        has_head=False,
        hugging_face_names=_NAMES,
    )


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the bases of the rotary embedding of layers without and with a window."""
    config["rope_parameters"] = {
        kind: {"rope_theta": metadata.keys.get(key, theta), "rope_type": "default"}
        for kind, key, theta in (
            (FULL, "rope.freq_base", _THETA),
            (WINDOWED, WINDOWED_BASE, DEFAULT_THETA),
        )
    }


FAMILY = Family(
    models={"ModernBertModel": "ModernBERT and embeddings of it"},
    model_types=("modernbert",),
    spec=spec,
    gguf=Gguf(
        name="modern-bert",
        keys={
            NORM_EPS: "norm_eps",
            WINDOW: "local_attention",
            WINDOW_PATTERN: "global_attn_every_n_layers",
        },
        finish=_finish,
    ),
    is_encoder=True,
)
