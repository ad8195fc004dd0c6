"""Qwen2 and Qwen2.5: biases on query, key and value, none on the output projection."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    IMAGE_SECTIONS,
    Family,
    Gguf,
    ModelSpec,
    add_image_sections,
)
from worker.models.layout import windows_of_upper_layers


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `sliding_window` counts only if `use_sliding_window` is set."""
    from worker.models.common import attention_decoder, llama_attention

    attention = replace(llama_attention(config), qkv_bias=True)
    return attention_decoder(config, attention, windows_of_upper_layers(config))


FAMILY = Family(
    models={"Qwen2ForCausalLM": "Qwen2, Qwen2.5, QwQ, Qwen2-VL, Qwen2.5-VL"},
    model_types=("qwen2",),
    spec=spec,
    gguf=Gguf(
        name="qwen2",
        other_names=("qwen2vl",),
        other_keys=(IMAGE_SECTIONS,),
        finish=add_image_sections,
    ),
    wrapped_types=("qwen2_vl_text", "qwen2_5_vl_text"),
)
