"""What Llama-like families share: reading their common configuration keys into a ModelSpec.

A family file calls llama_like with its own differences.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from worker.layers.activation import Activation
from worker.models.attention import AttentionSpec
from worker.models.config_reader import ConfigReader
from worker.models.gated_mlp import GatedMlpSpec
from worker.models.parts import PartSpec
from worker.models.rope import Rope, rope_from_config
from worker.models.spec import LayerSpec, ModelSpec

FULL: Final = "full_attention"
WINDOWED: Final = "sliding_attention"
"""Kinds of layers, as configurations call them."""
_DEFAULT_MAX_WINDOW_LAYERS: Final = 28
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_MAX_LAYERS: Final = 4096
_MAX_ROTATIONS: Final = 1 << 30
"""Positions times the size of a head: cosines and sines of all are kept."""


def llama_like(
    config: ConfigReader,
    *,
    architecture: str,
    head_dim: int | None = None,
    ropes: Sequence[Rope] | None = None,
    windows: Sequence[int | None] | None = None,
    attention: Mapping[str, Any] = _NOTHING,
    activation: Activation | None = None,
    mlps: Sequence[PartSpec] | None = None,
    **model: Any,
) -> ModelSpec:
    """Return the spec of a decoder with pre-norms, rotary attention and a gated MLP.

    A family passes what is different from Llama: head_dim, ropes and windows of each layer, other
    fields of AttentionSpec, the activation, the MLP of each layer if these are not gated MLPs of
    one size, and fields of ModelSpec. The keys of the configuration behind ropes, windows,
    activation and MLPs are read here only if the family does not pass them.
    Raises ModelError naming key and value for what is missing or not supported.
    """
    hidden_size = config.integer("hidden_size")
    num_layers = config.integer("num_hidden_layers", most=_MAX_LAYERS)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = head_dim or config.integer("head_dim", max(1, hidden_size // num_heads))
    max_position = config.integer("max_position_embeddings")
    if num_heads % num_kv_heads:
        raise config.refusal(
            "num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}"
        )
    if head_dim % 2:
        raise config.refusal("head_dim", head_dim, "the rotary embedding needs an even number")
    if head_dim * max_position > _MAX_ROTATIONS:
        raise config.refusal(
            "max_position_embeddings",
            max_position,
            f"at most {_MAX_ROTATIONS // head_dim} is supported with heads of {head_dim}",
        )
    config.must_be("mlp_bias", False)
    if activation is None and mlps is None:
        config.must_be("hidden_act", "silu", "swish")
    if ropes is None:
        ropes = (rope_from_config(config, max_position),) * num_layers
    if windows is None:
        kinds = layer_kinds(config, (FULL,), lambda layer: FULL)
        windows = layer_windows(config, kinds, {FULL: None})
    heads: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }
    if mlps is None:
        gated_mlp = GatedMlpSpec(
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            activation=activation or "silu",
        )
        mlps = (gated_mlp,) * num_layers
    fields: dict[str, Any] = {
        "vocab_size": config.integer("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
    }
    spec = ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        max_position=max_position,
        layers=tuple(
            LayerSpec(
                mixer=AttentionSpec(**(heads | dict(attention)), rope=rope, window=window), mlp=mlp
            )
            for rope, window, mlp in zip(ropes, windows, mlps, strict=True)
        ),
        **(fields | model),
    )
    config.refuse_leftovers()
    return spec


def layer_kinds(
    config: ConfigReader, supported: tuple[str, ...], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the kind of each layer: from `layer_types`, or by the family's own pattern.

    Raises ModelError for a kind that is not supported.
    """
    num_layers = config.integer("num_hidden_layers", most=_MAX_LAYERS)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(default(layer) for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.refusal("layer_types", kinds, f"{num_layers} names are needed")
    for kind in kinds:
        if kind not in supported:
            raise config.refusal("layer_types", kind, f"supported: {', '.join(supported)}")
    return tuple(kinds)


def layer_windows(
    config: ConfigReader, kinds: tuple[str, ...], windows: Mapping[str, int | None]
) -> tuple[int | None, ...]:
    """Return the window of each layer by its kind.

    A window as long as the model's longest sequence hides nothing and becomes None.
    """
    max_position = config.integer("max_position_embeddings")
    narrow = {
        kind: window if window is not None and window < max_position else None
        for kind, window in windows.items()
    }
    return tuple(narrow[kind] for kind in kinds)


def window_from_config(config: ConfigReader) -> int | None:
    return None if config.get("sliding_window") is None else config.integer("sliding_window")


def windows_of_upper_layers(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the windows of Qwen's layers.

    With `use_sliding_window`, layers from `max_window_layers` on have a window.
    """
    window = window_from_config(config)
    used = config.flag("use_sliding_window", False) and window is not None
    first = config.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, least=0)
    supported = (FULL, WINDOWED) if used else (FULL,)
    kinds = layer_kinds(
        config, supported, lambda layer: WINDOWED if used and layer >= first else FULL
    )
    return layer_windows(config, kinds, {FULL: None, WINDOWED: window})
