"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotary embedding is not scaled."""

from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    WINDOW,
    WINDOW_PATTERN,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    add_layer_types,
    set_window_theta,
)
from worker.models.layout import FULL, POST_NORMS, WINDOWED, layer_windows, window_kinds
from worker.models.rope import KindOfRope, ropes_by_kind

_THETA: Final = 500_000.0
_ROPES: Final = (
    KindOfRope(FULL, "rope_theta", _THETA, scaled=True),
    KindOfRope(WINDOWED, "rope_theta", _THETA, scaled=False),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every fourth layer has full attention."""
    from worker.models.common import attention_decoder, llama_attention

    window = config.integer("sliding_window", 4096)
    kinds = window_kinds(config, window, lambda layer: (layer + 1) % 4 != 0)
    windows = layer_windows(config, kinds, window)
    ropes = ropes_by_kind(config, _ROPES, config.integer("max_position_embeddings"))
    attention = replace(
        llama_attention(config, rope=ropes[FULL], bias=config.flag("attention_bias", False)),
        joint_qk_norm=True,
    )
    layers = attention_decoder(config, attention, windows, [ropes[kind] for kind in kinds])
    return replace(layers, norms=POST_NORMS)


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add which layers have a window: these rotate without a scaling."""
    add_layer_types(config, metadata)
    set_window_theta(config, config["rope_parameters"]["rope_theta"])


FAMILY = Family(
    models={"Olmo3ForCausalLM": "OLMo 3"},
    model_types=("olmo3",),
    spec=spec,
    gguf=Gguf(
        name="olmo2",
        is_marked=lambda keys: WINDOW in keys,
        keys={WINDOW: "sliding_window"},
        other_keys=(WINDOW_PATTERN,),
        finish=_finish,
    ),
)
