"""gpt-oss: attention with sinks, windows in every second layer, and a mixture of experts as MLP."""

from typing import Final

from worker.layers.activation import ALPHA, LIMIT
from worker.models.common import (
    FULL,
    WINDOWED,
    dense_and_sparse,
    layer_kinds,
    layer_windows,
    llama_like,
    router_from_config,
)
from worker.models.config_reader import ConfigReader
from worker.models.moe import MoeNames, MoeSpec
from worker.models.rope import rope_from_config
from worker.models.spec import LayerNorms, ModelSpec

MODEL_TYPE = "gpt_oss"
_NAMES: Final = MoeNames(router="mlp.router", experts=None, interleaved=True, transposed=True)
_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    mlp=("post_attention_layernorm", "post_attention_norm"),
)
_THETA: Final = 150_000.0
_WINDOW: Final = 128


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the weights of a token's experts are a softmax over their logits."""
    config.must_be("hidden_act", "silu", "swish")
    config.must_be("swiglu_limit", LIMIT)
    config.must_be("swiglu_alpha", ALPHA)
    router = router_from_config(config, bias=True)
    config.must_be("experts_per_token", router.top_k)  # an older name, in the published files
    mixture = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        router=router,
        activation="swiglu_oai",
        bias=True,
        names=_NAMES,
    )
    kinds = layer_kinds(config, (FULL, WINDOWED), lambda layer: FULL if layer % 2 else WINDOWED)
    windows = {FULL: None, WINDOWED: config.integer("sliding_window", _WINDOW)}
    bias = config.flag("attention_bias", True)
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        raise config.refusal("rope_scaling", None, "an object is needed")
    rope = rope_from_config(config, config.integer("max_position_embeddings"), _THETA)
    return llama_like(
        config,
        architecture="GptOssForCausalLM",
        ropes=(rope,) * len(kinds),
        windows=layer_windows(config, kinds, windows),
        attention={"qkv_bias": bias, "output_bias": bias, "sinks": True},
        mlps=dense_and_sparse(config, mixture, lambda layer: True),
        norms=_NORMS,
    )
