"""EXAONE 4: norms after each part and over each query and key head; in the models with windows only
layers with a window rotate.
"""

from typing import Final

from worker.models.common import (
    FULL,
    WINDOWED,
    layer_kinds,
    layer_windows,
    llama_like,
    window_from_config,
)
from worker.models.config_reader import ConfigReader
from worker.models.rope import NoRope, Rope, rope_from_config
from worker.models.spec import POST_NORMS, ModelSpec

MODEL_TYPE = "exaone4"
_DEFAULT_PATTERN: Final = 4


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every `sliding_window_pattern`th layer has full
    attention, or, where that is a text such as "LLLG", each layer of a G and the last one.
    """
    num_layers = config.integer("num_hidden_layers")
    window = window_from_config(config)
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise config.refusal("sliding_window_pattern", pattern, "a text of L and G is needed")
        is_full = [
            pattern[layer % len(pattern)] == "G" or layer == num_layers - 1
            for layer in range(num_layers)
        ]
    else:
        every = config.integer("sliding_window_pattern", _DEFAULT_PATTERN) if window else 1
        is_full = [(layer + 1) % every == 0 for layer in range(num_layers)]
    kinds = layer_kinds(
        config,
        (FULL, WINDOWED) if window else (FULL,),
        lambda layer: FULL if window is None or is_full[layer] else WINDOWED,
    )
    rope: Rope = rope_from_config(config, config.integer("max_position_embeddings"))
    return llama_like(
        config,
        architecture="Exaone4ForCausalLM",
        ropes=[rope if window is None or kind == WINDOWED else NoRope() for kind in kinds],
        windows=layer_windows(config, kinds, {FULL: None, WINDOWED: window}),
        attention={"qk_norm": True},
        norms=POST_NORMS,
        norm_eps=config.number("rms_norm_eps", 1e-5),
    )
