"""Phi-3, Phi-3.5 and Phi-4: stacked projections; LongRoPE and partial rotation in some sizes."""

from dataclasses import replace
from typing import Any

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    WINDOW,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    add_partially_rotated_heads,
)
from worker.models.layout import window_from_config, windows_of_all_layers


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; requests beyond the original length select the long factors of LongRoPE."""
    from worker.models.common import attention_decoder, gated_mlps, llama_attention

    config.must_be("attention_bias", False)
    config.must_be("lm_head_bias", False)
    config.must_be("full_attn_mod", 1)
    attention = replace(llama_attention(config, rotary_fraction=1.0), stacked_qkv=True)
    windows = windows_of_all_layers(config, window_from_config(config))
    mlps = gated_mlps(config, stacked_gate_up=True)
    return attention_decoder(config, attention, windows, mlps=mlps)


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add what LongRoPE needs beside its factors, which are tensors of the file."""
    config["rope_parameters"] |= metadata.renamed(
        {
            "rope.scaling.original_context_length": "original_max_position_embeddings",
            "rope.scaling.attn_factor": "attention_factor",
        }
    )


FAMILY = Family(
    models={"Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"},
    model_types=("phi3",),
    spec=spec,
    gguf=Gguf(
        name="phi3",
        keys={WINDOW: "sliding_window"},
        add_heads=add_partially_rotated_heads,
        finish=_finish,
    ),
)
