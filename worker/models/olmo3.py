"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotary embedding is not scaled."""

from typing import Final

from worker.models.common import FULL, WINDOWED, layer_kinds, layer_windows, llama_like
from worker.models.config_reader import ConfigReader
from worker.models.rope import KindOfRope, ropes_by_kind
from worker.models.spec import POST_NORMS, ModelSpec

MODEL_TYPE = "olmo3"
_THETA: Final = 500_000.0
_ROPES: Final = (
    KindOfRope(FULL, "rope_theta", _THETA, scaled=True),
    KindOfRope(WINDOWED, "rope_theta", _THETA, scaled=False),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every fourth layer has full attention."""
    kinds = layer_kinds(
        config, (FULL, WINDOWED), lambda layer: WINDOWED if (layer + 1) % 4 else FULL
    )
    windows = {FULL: None, WINDOWED: config.integer("sliding_window", 4096)}
    ropes = ropes_by_kind(config, _ROPES, config.integer("max_position_embeddings"))
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="Olmo3ForCausalLM",
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=layer_windows(config, kinds, windows),
        attention={"qkv_bias": bias, "output_bias": bias, "joint_qk_norm": True},
        norms=POST_NORMS,
    )
