"""What the Llama-like families have in common in their configurations.

A family file calls `llama_like` with its own differences and adds nothing else.
"""

from typing import Any

from worker.models.config_reader import ConfigReader
from worker.models.rope_config import rope_from_config
from worker.models.spec import ModelSpec


def llama_like(config: ConfigReader, **differences: Any) -> ModelSpec:
    """The spec of a decoder with pre-norms, rotary attention and a gated SiLU MLP.

    `differences` are the fields of ModelSpec that the family sets itself. Raises
    ModelError naming key and value for what is missing or not supported.
    """
    hidden_size = config.integer("hidden_size")
    num_layers = config.integer("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", max(1, hidden_size // num_heads))
    max_position = config.integer("max_position_embeddings")
    if num_heads % num_kv_heads:
        raise config.refusal(
            "num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}"
        )
    if head_dim % 2:
        raise config.refusal("head_dim", head_dim, "the rotary embedding needs an even number")
    config.must_be("hidden_act", "silu", "swish")
    config.must_be("mlp_bias", False)
    _full_attention_only(config, num_layers)
    fields: dict[str, Any] = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": max_position,
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope": rope_from_config(config, max_position),
        "windows": (None,) * num_layers,
        "tied_embeddings": config.flag("tie_word_embeddings", False),
    }
    spec = ModelSpec(**(fields | differences))
    config.refuse_leftovers()
    return spec


def refuse_sliding_window(config: ConfigReader) -> None:
    """Raise ModelError for a window that would hide a position the model is made for."""
    window = config.get("sliding_window")
    if window is None:
        return
    if config.integer("sliding_window") < config.integer("max_position_embeddings"):
        raise config.refusal("sliding_window", window, "sliding-window attention is not supported")


def _full_attention_only(config: ConfigReader, num_layers: int) -> None:
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if len(kinds) != num_layers or set(kinds) != {"full_attention"}:
        raise config.refusal("layer_types", kinds, "supported: full_attention in every layer")
