"""Qwen3 with a mixture of experts as MLP: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder."""

from worker.models.common import (
    dense_and_sparse,
    llama_like,
    qwen_sparse_layers,
    router_from_config,
    window_from_config,
    windows_of_all_layers,
)
from worker.models.config_reader import ConfigReader
from worker.models.moe import MoeSpec
from worker.models.spec import ModelSpec

MODEL_TYPE = "qwen3_moe"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `norm_topk_prob` lets the weights of a token's experts sum to 1."""
    config.must_be("hidden_act", "silu", "swish")
    router = router_from_config(config, normalised=config.flag("norm_topk_prob", False))
    mixture = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        router=router,
    )
    bias = config.flag("attention_bias", False)
    config.get("max_window_layers")  # a window is for all layers of this family
    has_window = config.flag("use_sliding_window", False)
    return llama_like(
        config,
        architecture="Qwen3MoeForCausalLM",
        windows=windows_of_all_layers(config, window_from_config(config) if has_window else None),
        attention={"qkv_bias": bias, "output_bias": bias, "qk_norm": True},
        mlps=dense_and_sparse(config, mixture, qwen_sparse_layers(config)),
    )
