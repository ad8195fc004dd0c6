"""Qwen3 with a mixture of experts as MLP: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DEEPSTACK_LAYERS,
    IMAGE_SECTIONS,
    SOFTMAX,
    Family,
    Gguf,
    ModelSpec,
    add_interleaved_sections,
)
from worker.models.layout import window_from_config, windows_of_all_layers


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `norm_topk_prob` lets the weights of a token's experts sum to 1."""
    from worker.models.common import (
        attention_decoder,
        dense_and_sparse,
        llama_attention,
        moe_spec,
        qwen_sparse_layers,
        router_from_config,
    )

    config.must_be("hidden_act", "silu", "swish")
    normalised = config.flag("norm_topk_prob", False)
    experts = moe_spec(config, replace(router_from_config(config), normalised=normalised))
    config.get("max_window_layers")  # a window is for all layers of this family
    has_window = config.flag("use_sliding_window", False)
    windows = windows_of_all_layers(config, window_from_config(config) if has_window else None)
    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias", False)), qk_norm=True
    )
    mlps = dense_and_sparse(config, experts, qwen_sparse_layers(config))
    return attention_decoder(config, attention, windows, mlps=mlps)


FAMILY = Family(
    models={"Qwen3MoeForCausalLM": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder, Qwen3-VL-30B-A3B"},
    model_types=("qwen3_moe",),
    spec=spec,
    gguf=Gguf(
        name="qwen3moe",
        other_names=("qwen3vlmoe",),
        other_keys=(IMAGE_SECTIONS, DEEPSTACK_LAYERS),
        gating=SOFTMAX,
        settings={"norm_topk_prob": True},
        finish=add_interleaved_sections,
    ),
    wrapped_types=("qwen3_vl_moe_text",),
)
