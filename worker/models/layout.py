"""How the layers of a model differ, as its configuration says: kinds, windows and norms.

Without torch, as configurations are read in processes that do not compute, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from worker.models.config_reader import ConfigReader

FULL: Final = "full_attention"
WINDOWED: Final = "sliding_attention"
LINEAR: Final = "linear_attention"
CONV: Final = "conv"
"""Kinds of layers, as configurations call them."""
MAX_LAYERS: Final = 4096
DEFAULT_MAX_WINDOW_LAYERS: Final = 28

NormNames = tuple[str, str]
"""Names of a layer's norm in a Hugging Face folder and in a GGUF file."""


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms that a layer has, by their names in model files.

    attention, mlp: of the residual before each part; without one, a part reads the residual itself.
    attention_post, mlp_post: of what each part adds to the residual.
    attention_sum, mlp_sum: of the residual after each part, which goes on with the norm.
    """

    attention: NormNames | None = None
    attention_post: NormNames | None = None
    mlp: NormNames | None = None
    mlp_post: NormNames | None = None
    attention_sum: NormNames | None = None
    mlp_sum: NormNames | None = None

    def items(self) -> list[tuple[str, NormNames]]:
        """Return the norms by this program's names."""
        norms = {
            "attention_norm": self.attention,
            "attention_post_norm": self.attention_post,
            "mlp_norm": self.mlp,
            "mlp_post_norm": self.mlp_post,
            "attention_sum_norm": self.attention_sum,
            "mlp_sum_norm": self.mlp_sum,
        }
        return [(name, names) for name, names in norms.items() if names is not None]


PRE_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"), mlp=("post_attention_layernorm", "ffn_norm")
)
POST_NORMS: Final = LayerNorms(
    attention_post=("post_attention_layernorm", "post_attention_norm"),
    mlp_post=("post_feedforward_layernorm", "post_ffw_norm"),
)
SANDWICH_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    attention_post=("post_attention_layernorm", "post_attention_norm"),
    mlp=("pre_feedforward_layernorm", "ffn_norm"),
    mlp_post=("post_feedforward_layernorm", "post_ffw_norm"),
)


QWEN_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    mlp=("post_attention_layernorm", "post_attention_norm"),
)
"""As PRE_NORMS; GGUF files of newer families have another name for the second."""


def num_layers_of(config: ConfigReader) -> int:
    return config.integer("num_hidden_layers", most=MAX_LAYERS)


def layer_kinds(
    config: ConfigReader, supported: tuple[str, ...], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the kind of each layer: from `layer_types`, or by the family's own pattern.

    Raises ModelError for a kind that is not supported.
    """
    num_layers = num_layers_of(config)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(default(layer) for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.refusal("layer_types", kinds, f"{num_layers} names are needed")
    for kind in kinds:
        if kind not in supported:
            raise config.refusal("layer_types", kind, f"supported: {', '.join(supported)}")
    return tuple(kinds)


def window_kinds(
    config: ConfigReader, window: int | None, has_window: Callable[[int], bool]
) -> tuple[str, ...]:
    """Return which layers are FULL and which WINDOWED; without a window all are FULL.

    has_window: the family's own pattern, for a configuration without `layer_types`.
    """
    if window is None:
        return layer_kinds(config, (FULL,), lambda layer: FULL)
    return layer_kinds(
        config, (FULL, WINDOWED), lambda layer: WINDOWED if has_window(layer) else FULL
    )


def layer_windows(
    config: ConfigReader, kinds: tuple[str, ...], window: int | None
) -> tuple[int | None, ...]:
    """Return the window of each layer: `window` if it is WINDOWED, else None.

    A window as long as the model's longest sequence hides nothing and becomes None.
    """
    if window is not None and window >= config.integer("max_position_embeddings"):
        window = None
    return tuple(window if kind == WINDOWED else None for kind in kinds)


def windows_of_all_layers(config: ConfigReader, window: int | None) -> tuple[int | None, ...]:
    """Return the same window for each layer; None for full attention."""
    kind = FULL if window is None else WINDOWED
    return layer_windows(config, layer_kinds(config, (kind,), lambda layer: kind), window)


def window_from_config(config: ConfigReader) -> int | None:
    return None if config.get("sliding_window") is None else config.integer("sliding_window")


def windows_of_upper_layers(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the windows of Qwen's layers.

    With `use_sliding_window`, layers from `max_window_layers` on have a window.
    """
    window = window_from_config(config)
    if not config.flag("use_sliding_window", False):
        window = None
    first = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
    kinds = window_kinds(config, window, lambda layer: layer >= first)
    return layer_windows(config, kinds, window)
