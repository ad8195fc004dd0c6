"""gpt-oss: attention with sinks, windows in every second layer, and a mixture of experts as MLP."""

from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    SOFTMAX_OF_CHOSEN,
    WINDOW,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
)
from worker.models.layout import QWEN_NORMS, layer_windows, window_kinds
from worker.models.rope import rope_from_config

_THETA: Final = 150_000.0
_WINDOW: Final = 128


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the weights of a token's experts are a softmax over their logits."""
    from worker.layers.activation import ALPHA, LIMIT
    from worker.models.common import (
        attention_decoder,
        dense_and_sparse,
        llama_attention,
        moe_spec,
        router_from_config,
    )
    from worker.models.moe import MoeNames

    config.must_be("hidden_act", "silu", "swish")
    config.must_be("swiglu_limit", LIMIT)
    config.must_be("swiglu_alpha", ALPHA)
    router = replace(router_from_config(config), bias=True)
    config.must_be("experts_per_token", router.top_k)  # an older name, in the published files
    experts = replace(
        moe_spec(config, router, "intermediate_size"),
        activation="swiglu_oai",
        bias=True,
        names=MoeNames(router="mlp.router", experts=None, interleaved=True, transposed=True),
    )
    window = config.integer("sliding_window", _WINDOW)
    kinds = window_kinds(config, window, lambda layer: layer % 2 == 0)
    windows = layer_windows(config, kinds, window)
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        raise config.refusal("rope_scaling", None, "an object is needed")
    rope = rope_from_config(config, config.integer("max_position_embeddings"), _THETA)
    attention = replace(
        llama_attention(config, rope=rope, bias=config.flag("attention_bias", True)), sinks=True
    )
    mlps = dense_and_sparse(config, experts, lambda layer: True)
    return replace(attention_decoder(config, attention, windows, mlps=mlps), norms=QWEN_NORMS)


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # files do not say so


FAMILY = Family(
    models={"GptOssForCausalLM": "gpt-oss-20b, gpt-oss-120b"},
    model_types=("gpt_oss",),
    spec=spec,
    gguf=Gguf(
        name="gpt-oss",
        keys={WINDOW: "sliding_window", "expert_feed_forward_length": "intermediate_size"},
        gating=SOFTMAX_OF_CHOSEN,
        finish=_finish,
    ),
)
