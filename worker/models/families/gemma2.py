"""Gemma 2: windows in every other layer, norms before and after each part, both soft caps."""

from dataclasses import replace
from typing import Any

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    WINDOW,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    add_query_scale,
)
from worker.models.layout import SANDWICH_NORMS, layer_windows, window_kinds


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; a soft cap that is null is none."""
    from worker.models.common import attention_decoder, gated_mlps, llama_attention

    config.must_be("hidden_activation", "gelu_pytorch_tanh")
    config.must_be("hidden_act", "gelu_pytorch_tanh")
    config.must_be("use_bidirectional_attention", False)
    config.get("sliding_window_size")  # beside `sliding_window` in the first files
    window = config.integer("sliding_window", 4096)
    kinds = window_kinds(config, window, lambda layer: layer % 2 == 0)
    windows = layer_windows(config, kinds, window)
    attention = replace(
        llama_attention(
            config,
            head_dim=config.integer("head_dim", 256),
            bias=config.flag("attention_bias", False),
        ),
        scale=config.integer("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=config.soft_cap("attn_logit_softcapping", 50.0),
    )
    mlps = gated_mlps(config, "gelu_tanh")
    return replace(
        attention_decoder(config, attention, windows, mlps=mlps, tied=True),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        norms=SANDWICH_NORMS,
        norms_add_one=True,
        logit_soft_cap=config.soft_cap("final_logit_softcapping", 30.0),
    )


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    add_query_scale(config, is_27b=metadata.keys["block_count"] == 46)


FAMILY = Family(
    models={"Gemma2ForCausalLM": "Gemma 2"},
    model_types=("gemma2",),
    spec=spec,
    gguf=Gguf(
        name="gemma2",
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            WINDOW: "sliding_window",
        },
        finish=_finish,
    ),
)
