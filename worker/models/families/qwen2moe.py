"""Qwen2 with a mixture of experts and a gated shared expert as MLP: Qwen1.5-MoE, Qwen2-57B-A14B."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import SOFTMAX, Family, Gguf, ModelSpec
from worker.models.layout import (
    DEFAULT_MAX_WINDOW_LAYERS,
    layer_windows,
    window_from_config,
    window_kinds,
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; with `use_sliding_window` every other lower layer has a window."""
    from worker.models.common import (
        attention_decoder,
        dense_and_sparse,
        llama_attention,
        qwen_mixture,
        qwen_sparse_layers,
    )

    config.must_be("hidden_act", "silu", "swish")
    experts = qwen_mixture(config, normalised=config.flag("norm_topk_prob", False))
    window = window_from_config(config) if config.flag("use_sliding_window", False) else None
    below = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
    kinds = window_kinds(config, window, lambda layer: layer < below and layer % 2 == 0)
    attention = replace(llama_attention(config), qkv_bias=config.flag("qkv_bias", True))
    windows = layer_windows(config, kinds, window)
    mlps = dense_and_sparse(config, experts, qwen_sparse_layers(config))
    return attention_decoder(config, attention, windows, mlps=mlps)


FAMILY = Family(
    models={"Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-57B-A14B"},
    model_types=("qwen2_moe",),
    spec=spec,
    gguf=Gguf(name="qwen2moe", gating=SOFTMAX),
)
