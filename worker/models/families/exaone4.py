"""EXAONE 4: norms after each part and over each query and key head; in the models with windows only
layers with a window rotate.
"""

from dataclasses import replace
from typing import Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    WINDOW,
    WINDOW_PATTERN,
    Family,
    Gguf,
    ModelSpec,
    add_layer_types,
)
from worker.models.layout import (
    POST_NORMS,
    WINDOWED,
    layer_windows,
    num_layers_of,
    window_from_config,
    window_kinds,
)
from worker.models.rope import NoRope

_DEFAULT_PATTERN: Final = 4


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every `sliding_window_pattern`th layer has full
    attention, or, where that is a text such as "LLLG", each layer of a G and the last one.
    """
    from worker.models.common import attention_decoder, llama_attention

    num_layers = num_layers_of(config)
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
    kinds = window_kinds(config, window, lambda layer: not is_full[layer])
    attention = replace(llama_attention(config), qk_norm=True)
    windows = layer_windows(config, kinds, window)
    ropes = [attention.rope if window is None or kind == WINDOWED else NoRope() for kind in kinds]
    return replace(attention_decoder(config, attention, windows, ropes, eps=1e-5), norms=POST_NORMS)


FAMILY = Family(
    models={"Exaone4ForCausalLM": "EXAONE 4"},
    model_types=("exaone4",),
    spec=spec,
    gguf=Gguf(
        name="exaone4",
        keys={WINDOW: "sliding_window"},
        other_keys=(WINDOW_PATTERN,),
        finish=add_layer_types,
    ),
)
