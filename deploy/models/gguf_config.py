"""Converts the metadata of a GGUF file to config.json, and reads how the model pools.

What only one family has is in its file of worker/models/families/. A setting that is not supported
is an error, because ignoring it would change the arithmetic silently.
"""

from collections.abc import Mapping
from typing import Any, Final

from deploy.models.gguf_header import GgufHeader
from proto.errors import ModelError, shown
from proto.messages.pooling import Pooler, PoolerLayer, PoolingType
from worker.models.families import FAMILIES, family_of
from worker.models.families.base import GATING, WINDOWED_BASE, Family, Gguf, GgufMetadata

_CONFIG_KEYS: Final = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Metadata key, without the architecture → key of config.json with the same meaning."""

_REQUIRED_KEYS: Final = (
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
)

_ROPE_SCALING_KEYS: Final = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Metadata key → key of rope_parameters with the same meaning."""

_SUPPORTED_KEYS: Final = frozenset(
    {
        *_CONFIG_KEYS,
        *_ROPE_SCALING_KEYS,
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.finetuned",
    }
)
"""Metadata keys that the files of every family may have."""

_CAUSAL: Final = "attention.causal"
_POOLING: Final = "pooling_type"
_POOLING_TYPES: Final[dict[int, PoolingType]] = {0: "mean", 1: "mean", 2: "cls", 3: "last"}
"""Value of pooling_type → pooling type. 0 says none: sentence-transformers takes the mean then."""
_POOLER_LAYERS: Final = ("dense_2", "dense_3")
"""Tensors, without ".weight", of the layers behind the pooling of EmbeddingGemma."""
_POOLING_MODEL_KEYS: Final = (
    WINDOWED_BASE,
    *(f"{name}_feat_{end}" for name in _POOLER_LAYERS for end in ("in", "out")),
)
"""Metadata keys that only models that cannot generate may have."""

_MAX_LAYERS: Final = 4096


def convert(path: str, header: GgufHeader) -> dict[str, Any]:
    """Return the metadata as config.json; raises ModelError naming a key that is not supported."""
    architecture = header.values["general.architecture"]
    prefix = architecture + "."
    keys = {
        key.removeprefix(prefix): value
        for key, value in header.values.items()
        if key.startswith(prefix)
    }
    known = _find_family(architecture, keys)
    family = known.gguf
    assert family is not None
    metadata = GgufMetadata(
        path=path,
        prefix=prefix,
        keys=keys,
        shapes={tensor.name: tensor.shape for tensor in header.tensors},
        only_pools=known.is_encoder or architecture == family.pooling_name,
    )
    _refuse_unsupported(family, metadata)
    _require_sizes(family, metadata)
    config: dict[str, Any] = {
        "architectures": [next(iter(known.models))],
        "model_type": known.model_types[0],
        **family.settings,
        **metadata.renamed({**_CONFIG_KEYS, **family.config_keys}),
        **{flag: tensor in metadata.shapes for flag, tensor in family.flags.items()},
    }
    if "vocab_size" not in config:
        config["vocab_size"] = len(header.values.get("tokenizer.ggml.tokens", ()))
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if known.is_encoder:
        _refuse_shared_keys(config)
    else:
        config["tie_word_embeddings"] = "output.weight" not in metadata.shapes
        # The count of a file includes the layers that predict further tokens.
        config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
        config["rope_parameters"] = _rope_parameters(metadata, family.rope_theta)
        family.add_heads(config, metadata)
    if family.finish is not None:
        family.finish(config, metadata)
    return config


def read_pooler(header: GgufHeader, config: Mapping[str, Any]) -> Pooler | None:
    """Return how the model pools; None for a model that only generates."""
    architecture = header.values["general.architecture"]
    kind = header.values.get(f"{architecture}.{_POOLING}")
    is_encoder = family_of(config["architectures"][0]).is_encoder
    only_pools = is_encoder or "use_bidirectional_attention" in config
    if kind is None and not only_pools:
        return None
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    size, layers = config["hidden_size"], []
    for name in _POOLER_LAYERS:
        shape = shapes.get(f"{name}.weight")
        if shape is None:
            continue
        if len(shape) != 2 or shape[1] != size:
            raise ModelError(f"tensor {name}.weight has shape {list(shape)}: not {size} columns")
        layers.append(PoolerLayer("dense", name))
        size = shape[0]
    return Pooler(
        types=(_POOLING_TYPES[kind or 0],),
        layers=tuple(layers),
        size=size,
        generates=not only_pools,
    )


def _find_family(architecture: str, keys: Mapping[str, Any]) -> Family:
    """Return the family of a file: those of Mixtral call themselves "llama", for example."""
    found = [family for family in FAMILIES.values() if architecture in family.gguf_names]
    for family in found:
        if family.gguf and family.gguf.is_marked and family.gguf.is_marked(keys):
            return family
    return next(family for family in found if family.gguf and family.gguf.is_marked is None)


def _refuse_unsupported(family: Gguf, metadata: GgufMetadata) -> None:
    """Raise ModelError for the first key that is not supported, or not with this value."""
    supported = {*_SUPPORTED_KEYS, *family.config_keys, *family.other_keys}
    if metadata.only_pools:
        supported.update(_POOLING_MODEL_KEYS)
    values: dict[str, tuple[Any, ...]] = {
        "expert_count": (0,),
        _POOLING: tuple(_POOLING_TYPES),
        _CAUSAL: (not metadata.only_pools,),
        **({GATING: (family.gating,)} if family.gating else {}),
    }
    for key, value in metadata.keys.items():
        if key not in supported and value not in values.get(key, ()):
            raise ModelError(f"the GGUF file sets {metadata.prefix}{key}, which is not supported")


def _require_sizes(family: Gguf, metadata: GgufMetadata) -> None:
    """Raise ModelError for a missing size, and for a number of layers that cannot be."""
    for key in _REQUIRED_KEYS:
        if key not in metadata.keys and key not in family.optional_keys:
            raise ModelError(f"{metadata.path} has no {metadata.prefix}{key}")
    num_layers = metadata.keys["block_count"]
    if type(num_layers) is not int or not 0 < num_layers <= _MAX_LAYERS:
        raise ModelError(
            f"{metadata.path} sets {metadata.prefix}block_count to {shown(num_layers)}: "
            f"a number from 1 to {_MAX_LAYERS} is needed"
        )


def _refuse_shared_keys(config: dict[str, Any]) -> None:
    """Remove the number of key heads of an encoder, which config.json does not have."""
    if config.pop("num_key_value_heads", None) not in (None, config["num_attention_heads"]):
        raise ModelError("attention.head_count_kv differs from head_count: not supported")


def _rope_parameters(metadata: GgufMetadata, theta: float) -> dict[str, Any]:
    """Return the rotary embedding under its names in config.json."""
    kind = metadata.keys.get("rope.scaling.type", "none")
    rope = {"rope_theta": metadata.keys.get("rope.freq_base", theta), "rope_type": "default"}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{metadata.prefix}rope.scaling.type {shown(kind)} is not supported")
    return {**rope, "rope_type": kind, **metadata.renamed(_ROPE_SCALING_KEYS)}
