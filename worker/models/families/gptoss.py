"""gpt-oss: attention with sinks, windows in every second layer, and a mixture of experts as MLP."""

from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    EXPERT_KEYS,
    GATING,
    SOFTMAX_OF_CHOSEN,
    WINDOW,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
)
from worker.models.layout import FULL, QWEN_NORMS, WINDOWED, layer_kinds, layer_windows
from worker.models.rope import rope_from_config

_THETA: Final = 150_000.0
_WINDOW: Final = 128


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the weights of a token's experts are a softmax over their logits."""
    from worker.layers.activation import ALPHA, LIMIT
    from worker.models.common import (
        attention_layers,
        decoder,
        dense_and_sparse,
        llama_attention,
        router_from_config,
    )
    from worker.models.moe import MoeNames, MoeSpec

    config.must_be("hidden_act", "silu", "swish")
    config.must_be("swiglu_limit", LIMIT)
    config.must_be("swiglu_alpha", ALPHA)
    router = replace(router_from_config(config), bias=True)
    config.must_be("experts_per_token", router.top_k)  # an older name, in the published files
    mixture = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        router=router,
        activation="swiglu_oai",
        bias=True,
        names=MoeNames(router="mlp.router", experts=None, interleaved=True, transposed=True),
    )
    kinds = layer_kinds(config, (FULL, WINDOWED), lambda layer: FULL if layer % 2 else WINDOWED)
    windows = {FULL: None, WINDOWED: config.integer("sliding_window", _WINDOW)}
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        raise config.refusal("rope_scaling", None, "an object is needed")
    rope = rope_from_config(config, config.integer("max_position_embeddings"), _THETA)
    attention = replace(
        llama_attention(config, rope=rope, bias=config.flag("attention_bias", True)), sinks=True
    )
    layers = attention_layers(config, attention, layer_windows(config, kinds, windows))
    mlps = dense_and_sparse(config, mixture, lambda layer: True)
    return replace(decoder(config, layers, mlps), norms=QWEN_NORMS)


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # files do not say so


FAMILY = Family(
    models={"GptOssForCausalLM": "gpt-oss-20b, gpt-oss-120b"},
    model_types=("gpt_oss",),
    spec=spec,
    gguf=Gguf(
        name="gpt-oss",
        keys={
            **EXPERT_KEYS,
            WINDOW: "sliding_window",
            "expert_feed_forward_length": "intermediate_size",
        },
        values={GATING: SOFTMAX_OF_CHOSEN},
        finish=_finish,
    ),
)
