"""Qwen3: an RMSNorm over every query and key head, and heads of 128 by default."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DEEPSTACK_LAYERS,
    IMAGE_SECTIONS,
    Family,
    Gguf,
    ModelSpec,
    add_interleaved_sections,
)
from worker.models.layout import windows_of_upper_layers


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `sliding_window` counts only if `use_sliding_window` is set."""
    from worker.models.common import attention_decoder, llama_attention

    attention = replace(
        llama_attention(
            config,
            head_dim=config.integer("head_dim", 128),
            bias=config.flag("attention_bias", False),
        ),
        qk_norm=True,
    )
    return attention_decoder(config, attention, windows_of_upper_layers(config))


FAMILY = Family(
    models={"Qwen3ForCausalLM": "Qwen3, Qwen3-VL"},
    model_types=("qwen3",),
    spec=spec,
    gguf=Gguf(
        name="qwen3",
        other_names=("qwen3vl",),
        other_keys=(IMAGE_SECTIONS, DEEPSTACK_LAYERS),
        finish=add_interleaved_sections,
    ),
    wrapped_types=("qwen3_vl_text",),
)
