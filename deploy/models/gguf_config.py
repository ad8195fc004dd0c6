"""Converts the metadata of a GGUF file to config.json, and reads how the model pools.

What only one family has is its entry in GGUF_FAMILIES. A setting that is not supported is an error,
because ignoring it would change the arithmetic silently.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.models.gguf_header import GgufHeader
from proto.errors import ModelError, shown
from proto.pooling import Pooler, PoolerLayer, PoolingType
from proto.prepared_model import FAMILIES, ModelFamily, family_of

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

_WINDOW: Final = "attention.sliding_window"
_WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
_WINDOWED_BASE: Final = "rope.freq_base_swa"
_NORM_EPS: Final = "attention.layer_norm_epsilon"
_CAUSAL: Final = "attention.causal"
_POOLING: Final = "pooling_type"
_POOLING_TYPES: Final[dict[int, PoolingType]] = {0: "mean", 1: "mean", 2: "cls", 3: "last"}
"""Value of pooling_type → pooling type. 0 says none: sentence-transformers takes the mean then."""
_POOLER_LAYERS: Final = ("dense_2", "dense_3")
"""Tensors, without ".weight", of the layers behind the pooling of EmbeddingGemma."""
_POOLING_MODEL_KEYS: Final = (
    _WINDOWED_BASE,
    *(f"{name}_feat_{end}" for name in _POOLER_LAYERS for end in ("in", "out")),
)
"""Metadata keys that only models that cannot generate may have."""

_EXPERT_KEYS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
"""Metadata key of a mixture of experts → key of config.json with the same meaning."""
_GATING: Final = "expert_gating_func"
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Values of expert_gating_func: how the weights of experts are computed from their logits."""

_LATENT_KEYS: Final = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_KEY_LENGTH, _VALUE_LENGTH = "attention.key_length_mla", "attention.value_length_mla"
"""Lengths of latent attention's heads. In older files attention.key_length and value_length are
these lengths, in newer ones those of the latents."""
_YARN_LOG: Final = "rope.scaling.yarn_log_multiplier"

_DELTA_RULE_KEYS: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_VALUES_OF_ALL_HEADS: Final = "ssm.inner_size"
_IMAGE_SECTIONS: Final = "rope.dimension_sections"
"""Dimensions of a head that rotate by the time, row and column of an image: text needs none."""

_GRANITE_KEYS: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_MINISTRAL3_ROPE_KEYS: Final = {
    "attention.temperature_scale": "llama_4_scaling_beta",
    _YARN_LOG: "mscale_all_dim",
}
"""Metadata key of Ministral 3 → key of rope_parameters with the same meaning."""

_DEFAULT_THETA: Final = 10_000.0
_GEMMA3_THETA: Final = 1_000_000.0
_GEMMA3_DEFAULT_WINDOW: Final = 4096
_MODERNBERT_THETA: Final = 160_000.0
_MAX_LAYERS: Final = 4096


@dataclass(frozen=True)
class GgufMetadata:
    """What a GGUF file says about its model.

    keys: metadata of the architecture by key, without `prefix`, which is its name and a dot.
    shapes: of the tensors, by name. only_pools: the model cannot generate.
    """

    path: str
    prefix: str
    keys: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    only_pools: bool

    def renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of those keys that the file has, under other names."""
        return {name: self.keys[key] for key, name in names.items() if key in self.keys}


ConfigStep = Callable[[dict[str, Any], GgufMetadata], None]
"""Adds to config.json what it reads in the metadata; raises ModelError if it is not supported."""


def _add_head_dim(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the head size; without one, config.json means hidden_size / num_attention_heads."""
    rotated = metadata.keys.get("rope.dimension_count")
    _set_head_dim(config, metadata, metadata.keys.get("attention.key_length", rotated), rotated)


@dataclass(frozen=True)
class GgufFamily:
    """What the GGUF files of one family have beside that of all families.

    model_type: that of config.json; empty if it is the name of the family's module.
    keys: metadata key → key of config.json with the same meaning.
    other_keys: metadata keys that `add_heads` or `finish` reads, or that may be ignored.
    values: metadata key → its only value that is supported.
    optional_keys: metadata keys that other families require.
    settings: keys of config.json that hold for all models of the family, and that files leave out.
    flags: key of config.json → name of a tensor. The key is true for files with this tensor.
    rope_theta: base of the rotary embedding if the file has none.
    add_heads: adds the sizes of heads; not called for encoders.
    finish: adds the rest, after everything else.
    """

    model_type: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    other_keys: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    optional_keys: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    rope_theta: float = _DEFAULT_THETA
    add_heads: ConfigStep = _add_head_dim
    finish: ConfigStep | None = None


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
    family = GGUF_FAMILIES.get(known.module, GgufFamily())
    metadata = GgufMetadata(
        path=path,
        prefix=prefix,
        keys=keys,
        shapes={tensor.name: tensor.shape for tensor in header.tensors},
        only_pools=known.is_encoder or architecture == known.pooling_gguf,
    )
    _refuse_unsupported(family, metadata)
    _require_sizes(family, metadata)
    config: dict[str, Any] = {
        "architectures": [name for name, each in FAMILIES.items() if each.module == known.module],
        "model_type": family.model_type or known.module,
        **family.settings,
        **metadata.renamed({**_CONFIG_KEYS, **family.keys}),
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


def _find_family(architecture: str, keys: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a file: those of Mixtral call themselves "llama", for example."""
    module = architecture
    if architecture == "llama" and keys.get("expert_count"):
        module = "mixtral"
    elif architecture == "deepseek2" and keys.get(_GATING) == _SIGMOID:
        module = "deepseek3"
    elif architecture == "olmo2" and _WINDOW in keys:
        module = "olmo3"
    found = [family for family in FAMILIES.values() if architecture in family.gguf_names]
    return next((family for family in found if family.module == module), found[0])


def _refuse_unsupported(family: GgufFamily, metadata: GgufMetadata) -> None:
    """Raise ModelError for the first key that is not supported, or not with this value."""
    supported = {*_SUPPORTED_KEYS, *family.keys, *family.other_keys}
    if metadata.only_pools:
        supported.update(_POOLING_MODEL_KEYS)
    values: dict[str, tuple[Any, ...]] = {
        "expert_count": (0,),
        _POOLING: tuple(_POOLING_TYPES),
        _CAUSAL: (not metadata.only_pools,),
        **{key: (value,) for key, value in family.values.items()},
    }
    for key, value in metadata.keys.items():
        if key not in supported and value not in values.get(key, ()):
            raise ModelError(f"the GGUF file sets {metadata.prefix}{key}, which is not supported")


def _require_sizes(family: GgufFamily, metadata: GgufMetadata) -> None:
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


def _set_head_dim(
    config: dict[str, Any], metadata: GgufMetadata, length: Any, rotated: Any
) -> None:
    """Set the head size if the file has one; heads rotate as a whole, and values are as long."""
    if length is None:
        return
    prefix = metadata.prefix
    if metadata.keys.get("attention.value_length", length) != length:
        raise ModelError(f"{prefix}attention.value_length differs from key_length: not supported")
    if rotated not in (None, length):
        raise ModelError(f"{prefix}rope.dimension_count is not the head size: not supported")
    config["head_dim"] = length


def _add_partially_rotated_heads(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the head size and the share of a head that rotates (rope.dimension_count)."""
    rotated = metadata.keys.get("rope.dimension_count")
    length = metadata.keys.get("attention.key_length", rotated)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if isinstance(width, int) and isinstance(heads, int):
        length = metadata.keys.get("attention.key_length", width // max(heads, 1))
    if isinstance(rotated, int) and isinstance(length, int):
        config["partial_rotary_factor"] = rotated / max(length, 1)
        rotated = length
    _set_head_dim(config, metadata, length, rotated)


def _add_latent_heads(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the sizes of latent attention's heads, and how YaRN scales their queries."""
    keys, rope = metadata.keys, config["rope_parameters"]
    config.pop("num_key_value_heads", None)  # 1 in newer files, which count latents
    length = keys.get(_KEY_LENGTH, keys.get("attention.key_length"))
    value = keys.get(_VALUE_LENGTH, keys.get("attention.value_length"))
    rotated = keys.get("rope.dimension_count")
    if not all(type(size) is int for size in (length, value, rotated)) or length <= rotated:
        raise ModelError(
            f"{metadata.prefix}{_KEY_LENGTH} {shown(length)}, value_length_mla {shown(value)} and "
            f"rope.dimension_count {shown(rotated)}: lengths of latent attention's heads are needed"
        )
    config["qk_nope_head_dim"], config["v_head_dim"] = length - rotated, value
    if config.get("n_group", 1) > 1 and config["model_type"] == "deepseek_v2":
        config["topk_method"] = "group_limited_greedy"
    if _YARN_LOG in keys and rope["rope_type"] == "yarn":
        # A file has 0.1 times this, and no other mscale: cosines and sines are not scaled.
        rope["mscale"] = rope["mscale_all_dim"] = 10 * keys[_YARN_LOG]


def _finish_bert(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the number of token types. A file of RoBERTa has only the positions that tokens use."""
    if shape := metadata.shapes.get("token_types.weight"):
        config["type_vocab_size"] = math.prod(shape[:-1])


def _finish_modernbert(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the bases of the rotary embedding of layers without and with a window."""
    config["rope_parameters"] = {
        kind: {"rope_theta": metadata.keys.get(key, theta), "rope_type": "default"}
        for kind, key, theta in (
            ("full_attention", "rope.freq_base", _MODERNBERT_THETA),
            ("sliding_attention", _WINDOWED_BASE, _DEFAULT_THETA),
        )
    }


def _add_layer_types(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add which layers have a window, if the file lists them."""
    pattern = metadata.keys.get(_WINDOW_PATTERN)
    if isinstance(pattern, list):
        config["layer_types"] = [
            "sliding_attention" if has_window else "full_attention" for has_window in pattern
        ]


def _finish_olmo3(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add which layers have a window: these rotate without a scaling."""
    _add_layer_types(config, metadata)
    _set_window_theta(config, config["rope_parameters"]["rope_theta"])


def _finish_gemma2(config: dict[str, Any], metadata: GgufMetadata) -> None:
    _add_query_scale(config, is_27b=metadata.keys["block_count"] == 46)


def _finish_gemma3(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the windows of five of six layers, which rotate with a base of their own."""
    num_layers = metadata.keys["block_count"]
    config.setdefault("sliding_window", _GEMMA3_DEFAULT_WINDOW)
    config["layer_types"] = [
        "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(num_layers)
    ]
    _set_window_theta(config, _DEFAULT_THETA)
    if metadata.only_pools:
        config["use_bidirectional_attention"] = True
    _add_query_scale(config, is_27b=num_layers == 62)


def _set_window_theta(config: dict[str, Any], theta: float) -> None:
    """Let layers with a window rotate with this base and without a scaling."""
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_theta": theta, "rope_type": "default"},
    }


def _add_query_scale(config: dict[str, Any], is_27b: bool) -> None:
    """Add the query scale of Gemma 2 and 3: that of the head size, except for the 27B models.

    GGUF files do not contain it; llama.cpp, too, recognises these models by their layers.
    """
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if is_27b and isinstance(heads, int) and isinstance(width, int):
        config["query_pre_attn_scalar"] = width // max(heads, 1)
    else:
        config["query_pre_attn_scalar"] = config.get("head_dim")


def _finish_gptoss(config: dict[str, Any], metadata: GgufMetadata) -> None:
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # files do not say so


def _finish_ministral3(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add how queries grow with positions, and the scale of YaRN."""
    config["rope_parameters"] |= metadata.renamed(_MINISTRAL3_ROPE_KEYS)
    if _YARN_LOG in metadata.keys:
        config["rope_parameters"]["mscale"] = 1.0


def _finish_phi3(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add what LongRoPE needs beside its factors, which are tensors of the file."""
    names = ("rope.scaling.original_context_length", "rope.scaling.attn_factor")
    longrope = {key: _ROPE_SCALING_KEYS[key] for key in names}
    config["rope_parameters"] |= metadata.renamed(longrope)


def _finish_delta_rule(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the size of a value head, and that weights are as llama.cpp's converter leaves them."""
    size, heads = (metadata.keys.get(key) for key in (_VALUES_OF_ALL_HEADS, "ssm.time_step_rank"))
    if type(size) is not int or type(heads) is not int or heads < 1 or size % heads:
        raise ModelError(
            f"{metadata.prefix}{_VALUES_OF_ALL_HEADS} {shown(size)} and ssm.time_step_rank "
            f"{shown(heads)}: the values of all heads and the number of these heads are needed"
        )
    config["linear_value_head_dim"] = size // heads
    config["of_llama_cpp"] = True


_QUERY_BIAS: Final = "blk.0.attn_q.bias"

GGUF_FAMILIES: Final[dict[str, GgufFamily]] = {
    "bert": GgufFamily(keys={_NORM_EPS: "layer_norm_eps"}, finish=_finish_bert),
    "cohere2": GgufFamily(
        keys={
            _NORM_EPS: "layer_norm_eps",
            "logit_scale": "logit_scale",
            _WINDOW: "sliding_window",
        }
    ),
    "deepseek2": GgufFamily(
        model_type="deepseek_v2",
        keys={**_EXPERT_KEYS, **_LATENT_KEYS},
        other_keys=(_KEY_LENGTH, _VALUE_LENGTH, _YARN_LOG),
        values={_GATING: _SOFTMAX},
        add_heads=_add_latent_heads,
    ),
    "deepseek3": GgufFamily(
        model_type="deepseek_v3",
        keys={**_EXPERT_KEYS, **_LATENT_KEYS},
        other_keys=(_KEY_LENGTH, _VALUE_LENGTH, _YARN_LOG),
        values={_GATING: _SIGMOID},
        settings={"norm_topk_prob": False},
        add_heads=_add_latent_heads,
    ),
    "ernie45": GgufFamily(model_type="ernie4_5", flags={"use_bias": _QUERY_BIAS}),
    "exaone4": GgufFamily(
        keys={_WINDOW: "sliding_window"}, other_keys=(_WINDOW_PATTERN,), finish=_add_layer_types
    ),
    "gemma2": GgufFamily(
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            _WINDOW: "sliding_window",
        },
        finish=_finish_gemma2,
    ),
    "gemma3": GgufFamily(
        model_type="gemma3_text",
        keys={_WINDOW: "sliding_window"},
        rope_theta=_GEMMA3_THETA,
        finish=_finish_gemma3,
    ),
    "glm": GgufFamily(
        flags={"attention_bias": _QUERY_BIAS}, add_heads=_add_partially_rotated_heads
    ),
    "glm4": GgufFamily(add_heads=_add_partially_rotated_heads),
    "glm4moe": GgufFamily(
        model_type="glm4_moe",
        keys=_EXPERT_KEYS,
        values={_GATING: _SIGMOID},
        flags={"attention_bias": _QUERY_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        add_heads=_add_partially_rotated_heads,
    ),
    "gptoss": GgufFamily(
        model_type="gpt_oss",
        keys={
            **_EXPERT_KEYS,
            _WINDOW: "sliding_window",
            "expert_feed_forward_length": "intermediate_size",
        },
        values={_GATING: _SOFTMAX_OF_CHOSEN},
        finish=_finish_gptoss,
    ),
    "granite": GgufFamily(keys=_GRANITE_KEYS),
    "granitemoe": GgufFamily(keys={**_EXPERT_KEYS, **_GRANITE_KEYS}, values={_GATING: _SOFTMAX}),
    "ministral3": GgufFamily(other_keys=tuple(_MINISTRAL3_ROPE_KEYS), finish=_finish_ministral3),
    "mixtral": GgufFamily(keys=_EXPERT_KEYS, values={_GATING: _SOFTMAX}),
    "modernbert": GgufFamily(
        keys={
            _NORM_EPS: "norm_eps",
            _WINDOW: "local_attention",
            _WINDOW_PATTERN: "global_attn_every_n_layers",
        },
        finish=_finish_modernbert,
    ),
    "olmo3": GgufFamily(
        keys={_WINDOW: "sliding_window"}, other_keys=(_WINDOW_PATTERN,), finish=_finish_olmo3
    ),
    "olmoe": GgufFamily(keys=_EXPERT_KEYS, values={_GATING: _SOFTMAX}),
    "phi3": GgufFamily(
        keys={_WINDOW: "sliding_window"},
        add_heads=_add_partially_rotated_heads,
        finish=_finish_phi3,
    ),
    "qwen2moe": GgufFamily(model_type="qwen2_moe", keys=_EXPERT_KEYS, values={_GATING: _SOFTMAX}),
    "qwen3moe": GgufFamily(
        model_type="qwen3_moe",
        keys=_EXPERT_KEYS,
        values={_GATING: _SOFTMAX},
        settings={"norm_topk_prob": True},
    ),
    "qwen35": GgufFamily(
        model_type="qwen3_5_text",
        keys=_DELTA_RULE_KEYS,
        other_keys=(_VALUES_OF_ALL_HEADS, _IMAGE_SECTIONS),
        add_heads=_add_partially_rotated_heads,
        finish=_finish_delta_rule,
    ),
    "qwen35moe": GgufFamily(
        model_type="qwen3_5_moe_text",
        keys={**_EXPERT_KEYS, **_DELTA_RULE_KEYS},
        other_keys=(_VALUES_OF_ALL_HEADS, _IMAGE_SECTIONS),
        values={_GATING: _SOFTMAX},
        optional_keys=("feed_forward_length",),
        add_heads=_add_partially_rotated_heads,
        finish=_finish_delta_rule,
    ),
    "seedoss": GgufFamily(
        model_type="seed_oss",
        flags={"attention_bias": _QUERY_BIAS, "attention_out_bias": "blk.0.attn_output.bias"},
    ),
    "starcoder2": GgufFamily(
        keys={_NORM_EPS: "norm_epsilon", _WINDOW: "sliding_window"},
        flags={"use_bias": _QUERY_BIAS},
    ),
}
"""Family by its module in worker.models; a family without an entry has nothing of its own."""
