"""Qwen2 with a mixture of experts and a gated shared expert as MLP: Qwen1.5-MoE, Qwen2-57B-A14B."""

from worker.models.common import (
    FULL,
    WINDOWED,
    dense_and_sparse,
    layer_kinds,
    layer_windows,
    llama_like,
    qwen_mixture,
    qwen_sparse_layers,
    window_from_config,
)
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "qwen2_moe"
_DEFAULT_MAX_WINDOW_LAYERS = 28


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; with `use_sliding_window` every other lower layer has a window."""
    config.must_be("hidden_act", "silu", "swish")
    mixture = qwen_mixture(config, normalised=config.flag("norm_topk_prob", False))
    window = window_from_config(config) if config.flag("use_sliding_window", False) else None
    below = config.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, least=0)
    kinds = layer_kinds(
        config,
        (FULL,) if window is None else (FULL, WINDOWED),
        lambda layer: FULL if window is None or layer % 2 or layer >= below else WINDOWED,
    )
    return llama_like(
        config,
        architecture="Qwen2MoeForCausalLM",
        windows=layer_windows(config, kinds, {FULL: None, WINDOWED: window}),
        attention={"qkv_bias": config.flag("qkv_bias", True)},
        mlps=dense_and_sparse(config, mixture, qwen_sparse_layers(config)),
    )
