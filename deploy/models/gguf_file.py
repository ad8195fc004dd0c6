"""Reads a GGUF file: tensor index, configuration, tokenizer.

Configuration and tokenizer are converted here and in gguf_tokenizer.py, from the header alone. A
setting that is not supported is an error, because ignoring it would change the arithmetic silently.
"""

import math
from array import array
from collections.abc import Mapping
from typing import Any, Final

from msgspec import structs

from deploy.models import gguf_header, gguf_tokenizer
from deploy.models.gguf_header import GgufHeader
from deploy.models.prepared_folder import ModelContents, ProgressCallback
from proto.errors import ModelError, shown
from proto.pooling import Pooler, PoolerLayer, PoolingType
from proto.prepared_model import FAMILIES, TensorEntry, TensorIndex, TensorPart

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
"""The same for mixtures of experts."""

_MIXTURES: Final[dict[str, dict[str, Any]]] = {
    "deepseek2": {},
    "deepseek3": {"norm_topk_prob": False},
    "glm4moe": {},
    "gptoss": {},
    "granitemoe": {},
    "mixtral": {},
    "olmoe": {},
    "qwen2moe": {},
    "qwen3moe": {"norm_topk_prob": True},
    "qwen35moe": {},
}
"""Families of mixtures: what their files leave out because it is the same for all models."""

_ENCODERS: Final = ("bert", "modernbert")
_NORM_EPS: Final = "attention.layer_norm_epsilon"
_CAUSAL: Final = "attention.causal"
_WINDOWED_BASE: Final = "rope.freq_base_swa"
_POOLING: Final = "pooling_type"
_POOLING_TYPES: Final[dict[int, PoolingType]] = {0: "mean", 1: "mean", 2: "cls", 3: "last"}
"""Numbers of pooling types; 0: none is chosen, where sentence-transformers takes the mean."""
_POOLER_LAYERS: Final = ("dense_2", "dense_3")
"""Layers of EmbeddingGemma behind pooling."""
_POOLER_KEYS: Final = tuple(
    f"{name}_feat_{end}" for name in _POOLER_LAYERS for end in ("in", "out")
)

_MODEL_TYPES: Final = {
    "deepseek2": "deepseek_v2",
    "deepseek3": "deepseek_v3",
    "ernie45": "ernie4_5",
    "gemma3": "gemma3_text",
    "glm4moe": "glm4_moe",
    "gptoss": "gpt_oss",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "seedoss": "seed_oss",
}
"""`model_type` of the families for which it is not the name of their module."""

_BIASES: Final = {
    "ernie45": {"use_bias": "blk.0.attn_q.bias"},
    "glm": {"attention_bias": "blk.0.attn_q.bias"},
    "glm4moe": {"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
    "seedoss": {
        "attention_bias": "blk.0.attn_q.bias",
        "attention_out_bias": "blk.0.attn_output.bias",
    },
    "starcoder2": {"use_bias": "blk.0.attn_q.bias"},
}
"""Flags of config.json by family → tensor that is in the file if the flag is set."""

_WINDOW: Final = "attention.sliding_window"
_WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
_GRANITE_KEYS: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_TEMPERATURE: Final = "attention.temperature_scale"
_YARN_LOG: Final = "rope.scaling.yarn_log_multiplier"
_MINISTRAL3_KEYS: Final = {_TEMPERATURE: "llama_4_scaling_beta", _YARN_LOG: "mscale_all_dim"}
"""Keys of the rotary embedding of Ministral 3 → in rope_parameters."""
_LATENT_KEYS: Final = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_LENGTHS_OF_HEADS: Final = {
    "attention.key_length": "attention.key_length_mla",
    "attention.value_length": "attention.value_length_mla",
}
"""Lengths of latent attention's heads in older files, and in newer ones, where the first two are
those of its latents."""
_WITH_LATENT_KV: Final = ("deepseek2", "deepseek3")
_VALUES, _SECTIONS = "ssm.inner_size", "rope.dimension_sections"
_DELTA_RULE_KEYS: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
"""Keys of families with gated delta-rule layers; values of all their heads are _VALUES. Text does
not need _SECTIONS, which are those of positions in images."""
_WITH_DELTA_RULE: Final = ("qwen35", "qwen35moe")
_OWN_KEYS: Final[dict[str, dict[str, str]]] = {
    "bert": {_NORM_EPS: "layer_norm_eps"},
    "cohere2": {
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "logit_scale": "logit_scale",
        _WINDOW: "sliding_window",
    },
    "deepseek2": _LATENT_KEYS,
    "deepseek3": _LATENT_KEYS,
    "exaone4": {_WINDOW: "sliding_window"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        _WINDOW: "sliding_window",
    },
    "gemma3": {_WINDOW: "sliding_window"},
    "gptoss": {_WINDOW: "sliding_window", "expert_feed_forward_length": "intermediate_size"},
    "granite": _GRANITE_KEYS,
    "granitemoe": _GRANITE_KEYS,
    "modernbert": {
        _NORM_EPS: "norm_eps",
        _WINDOW: "local_attention",
        _WINDOW_PATTERN: "global_attn_every_n_layers",
    },
    "olmo3": {_WINDOW: "sliding_window"},
    "phi3": {_WINDOW: "sliding_window"},
    "qwen35": _DELTA_RULE_KEYS,
    "qwen35moe": _DELTA_RULE_KEYS,
    "starcoder2": {"attention.layer_norm_epsilon": "norm_epsilon", _WINDOW: "sliding_window"},
}
"""Keys of one family, as _CONFIG_KEYS."""

_WITH_PATTERN: Final = ("exaone4", "olmo3")
"""Families whose files say which layers have a window."""

_PARTIALLY_ROTATED: Final = ("glm", "glm4", "glm4moe", "phi3", "qwen35", "qwen35moe")
"""Families whose rope.dimension_count may be less than the head size."""

_ROPE_FACTORS: Final = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
"""Key of rope_parameters → float32 tensor with its numbers."""

_GATING_KEY: Final = "expert_gating_func"
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
"""What scores of experts are made by, as a number."""
_GATINGS: Final = {"deepseek3": _SIGMOID, "glm4moe": _SIGMOID, "gptoss": _SOFTMAX_OF_CHOSEN}

_REQUIRED_KEYS: Final = (
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
)

_SUPPORTED_KEYS: Final = frozenset(
    {
        *_CONFIG_KEYS,
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)

_GEMMA3: Final = "Gemma3ForCausalLM"
_GEMMA3_DEFAULT_WINDOW: Final = 4096
_GEMMA3_THETA: Final = 1_000_000.0
_GEMMA3_LOCAL_THETA: Final = 10_000.0
_MODERNBERT_THETA: Final = 160_000.0
_DEFAULT_THETA: Final = 10_000.0
_MAX_LAYERS: Final = 4096
_MAX_FACTOR_BYTES: Final = 4096
_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".scale", ".input_scale"
"""Endings of the names of a weight in NVFP4, of the scale of all its numbers, or of those of each
expert, and of that of a product's input."""

_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}

_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


def read(path: str, report: ProgressCallback) -> ModelContents:
    """Read a GGUF file; raises ModelError if it is damaged or not supported."""
    report("reading the GGUF header")
    header = gguf_header.read(path)
    _check(header, path)
    metadata = header.values
    report("converting configuration and tokenizer")
    config = _config(path, header)
    pooler = _pooler(header, config)
    tensors = _without_rope_factors(path, header, config)
    tokenizer_json, tokenizer_config, template = gguf_tokenizer.convert(path, metadata)
    return ModelContents(
        config=config,
        tokenizer_json=tokenizer_json,
        tokenizer_config=tokenizer_config,
        chat_template=template,
        tensors=TensorIndex("gguf", (path,), _with_scales(path, tensors)),
        eos_token_ids=_end_tokens(path, metadata),
        bos_token_id=gguf_tokenizer.token_id(path, metadata, "bos_token_id"),
        pooler=pooler,
    )


def _check(header: GgufHeader, path: str) -> None:
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path} has no general.architecture")
    supported = dict.fromkeys(name for family in FAMILIES.values() for name in family.gguf_names)
    if architecture not in supported:
        raise ModelError(
            f"GGUF architecture {shown(architecture)} is not supported; "
            f"supported: {', '.join(supported)}"
        )
    if header.values.get("split.count", 0) not in (0, 1):  # 0: a joined file
        raise ModelError("a GGUF model that is split over several files is not supported: join it")
    if not isinstance(header.values.get("tokenizer.ggml.model"), str):
        raise ModelError(f"{path} has no tokenizer (tokenizer.ggml.model)")
    if not header.tensors:
        raise ModelError(f"{path} has no tensors")


def _config(path: str, header: GgufHeader) -> dict[str, Any]:
    """Return the metadata as config.json."""
    metadata = header.values
    architecture = metadata["general.architecture"]
    prefix = architecture + "."
    own = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    family = _family(architecture, own)
    is_gemma3, mixture = family == "gemma3", _MIXTURES.get(family)
    keys = _CONFIG_KEYS if mixture is None else _CONFIG_KEYS | _EXPERT_KEYS
    keys = keys | _OWN_KEYS.get(family, {})
    gating = _GATINGS.get(family, _SOFTMAX)
    is_latent = family in _WITH_LATENT_KV
    is_bidirectional = family in _ENCODERS or architecture == FAMILIES[_GEMMA3].pooling_gguf
    for key in own:
        if (
            key not in _SUPPORTED_KEYS
            and key not in keys
            and not (family in _WITH_PATTERN and key == _WINDOW_PATTERN)
            and not (family == "ministral3" and key in _MINISTRAL3_KEYS)
            and not (mixture is not None and key == _GATING_KEY and own[key] == gating)
            and not (is_latent and key in (*_LENGTHS_OF_HEADS.values(), _YARN_LOG))
            and not (key == "expert_count" and own[key] == 0)
            and not (family in _WITH_DELTA_RULE and key in (_VALUES, _SECTIONS))
            and not (key == _POOLING and own[key] in _POOLING_TYPES)
            and not (key == _CAUSAL and own[key] is not is_bidirectional)
            and not (is_bidirectional and key in (_WINDOWED_BASE, *_POOLER_KEYS))
        ):
            raise ModelError(f"the GGUF file sets {prefix}{key}, which is not supported")
    for key in _REQUIRED_KEYS:
        if key not in own and not (family == "qwen35moe" and key == "feed_forward_length"):
            raise ModelError(f"{path} has no {prefix}{key}")
    num_layers = own["block_count"]
    if type(num_layers) is not int or not 0 < num_layers <= _MAX_LAYERS:
        raise ModelError(
            f"{path} sets {prefix}block_count to {shown(num_layers)}: "
            f"a number from 1 to {_MAX_LAYERS} is needed"
        )
    config: dict[str, Any] = {
        "architectures": [name for name, known in FAMILIES.items() if known.module == family],
        "model_type": _MODEL_TYPES.get(family, family),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in header.tensors),
        **(mixture or {}),
        **{hf_key: own[key] for key, hf_key in keys.items() if key in own},
    }
    if "vocab_size" not in config:
        config["vocab_size"] = len(metadata.get("tokenizer.ggml.tokens", ()))
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if family in _ENCODERS:
        _add_encoder(config, own, header)
        return config
    if not is_latent:
        _add_head_dim(config, own, prefix, family)
    names = {tensor.name for tensor in header.tensors}
    config |= {flag: tensor in names for flag, tensor in _BIASES.get(family, {}).items()}
    if "nextn_predict_layers" in keys:  # the count has the layers that predict further tokens, too
        config["num_hidden_layers"] -= own.get("nextn_predict_layers", 0)
    if family in _WITH_DELTA_RULE:
        _add_delta_rule(config, own, prefix)
    if family in _WITH_PATTERN and isinstance(own.get(_WINDOW_PATTERN), list):
        config["layer_types"] = [
            "sliding_attention" if has_window else "full_attention"
            for has_window in own[_WINDOW_PATTERN]
        ]
    rope = _rope_parameters(own, prefix, _GEMMA3_THETA if is_gemma3 else _DEFAULT_THETA)
    config["rope_parameters"] = rope
    if is_latent:
        _add_latent_heads(config, own, prefix, rope)
    if family == "gptoss" and rope["rope_type"] == "yarn":
        rope["truncate"] = False  # files do not say so
    if is_gemma3:
        _add_gemma3(config, own, rope)
        if is_bidirectional:
            config["use_bidirectional_attention"] = True
    if family in _LAYERS_OF_27B:
        _add_query_scale(config, num_layers, _LAYERS_OF_27B[family])
    if family == "olmo3":  # layers with a window rotate without a scaling
        config["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": rope["rope_theta"], "rope_type": "default"},
        }
    if family == "ministral3":
        rope |= {name: own[key] for key, name in _MINISTRAL3_KEYS.items() if key in own}
        if _YARN_LOG in own:
            rope["mscale"] = 1.0
    return config


def _family(architecture: str, own: Mapping[str, Any]) -> str:
    """Return the module of the family: files of Mixtral call themselves "llama", for example."""
    if architecture == "llama" and own.get("expert_count"):
        return "mixtral"
    if architecture == "deepseek2" and own.get(_GATING_KEY) == _SIGMOID:
        return "deepseek3"
    if architecture == "olmo2" and _WINDOW in own:
        return "olmo3"
    modules = [family.module for family in FAMILIES.values() if architecture in family.gguf_names]
    return architecture if architecture in modules else modules[0]


def _add_encoder(config: dict[str, Any], own: Mapping[str, Any], header: GgufHeader) -> None:
    """Add what only encoders have: token types, or the bases of both kinds of layers.

    No heads share keys, and of RoBERTa's positions files have only those that belong to tokens.
    """
    del config["tie_word_embeddings"]
    if config.pop("num_key_value_heads", None) not in (None, config["num_attention_heads"]):
        raise ModelError("attention.head_count_kv differs from head_count: not supported")
    if config["model_type"] == "bert":
        shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        if shape := shapes.get("token_types.weight"):
            config["type_vocab_size"] = math.prod(shape[:-1])
        return
    config["rope_parameters"] = {
        kind: {"rope_theta": own.get(key, theta), "rope_type": "default"}
        for kind, key, theta in (
            ("full_attention", "rope.freq_base", _MODERNBERT_THETA),
            ("sliding_attention", _WINDOWED_BASE, _DEFAULT_THETA),
        )
    }


def _pooler(header: GgufHeader, config: Mapping[str, Any]) -> Pooler | None:
    """Return how the model pools; None for a model that only generates."""
    architecture = header.values["general.architecture"]
    kind = header.values.get(f"{architecture}.{_POOLING}")
    only_pools = config["model_type"] in _ENCODERS or "use_bidirectional_attention" in config
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


def _add_latent_heads(
    config: dict[str, Any], own: Mapping[str, Any], prefix: str, rope: dict[str, Any]
) -> None:
    """Add the sizes of latent attention's heads, and how YaRN scales their queries."""
    config.pop("num_key_value_heads", None)  # 1 in newer files, which count latents
    key, value = (own.get(newer, own.get(older)) for older, newer in _LENGTHS_OF_HEADS.items())
    rotated = own.get("rope.dimension_count")
    if not all(type(length) is int for length in (key, value, rotated)) or key <= rotated:
        raise ModelError(
            f"{prefix}attention.key_length_mla {shown(key)}, value_length_mla {shown(value)} and "
            f"rope.dimension_count {shown(rotated)}: lengths of latent attention's heads are needed"
        )
    config["qk_nope_head_dim"], config["v_head_dim"] = key - rotated, value
    if config.get("n_group", 1) > 1 and config["model_type"] == "deepseek_v2":
        config["topk_method"] = "group_limited_greedy"
    if _YARN_LOG in own and rope["rope_type"] == "yarn":
        # A file has 0.1 times this, and no other mscale: cosines and sines are not scaled.
        rope["mscale"] = rope["mscale_all_dim"] = 10 * own[_YARN_LOG]


def _add_delta_rule(config: dict[str, Any], own: Mapping[str, Any], prefix: str) -> None:
    """Add the size of a value head, and that weights are as llama.cpp's converter leaves them."""
    size, heads = own.get(_VALUES), own.get("ssm.time_step_rank")
    if type(size) is not int or type(heads) is not int or heads < 1 or size % heads:
        raise ModelError(
            f"{prefix}{_VALUES} {shown(size)} and ssm.time_step_rank {shown(heads)}: the values of "
            "all heads and the number of these heads are needed"
        )
    config["linear_value_head_dim"] = size // heads
    config["of_llama_cpp"] = True


def _add_head_dim(config: dict[str, Any], own: Mapping[str, Any], prefix: str, family: str) -> None:
    """Add the head size; without one, config.json means hidden_size / num_attention_heads."""
    rotated = own.get("rope.dimension_count")
    length = own.get("attention.key_length", rotated)
    if family in _PARTIALLY_ROTATED:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        if isinstance(width, int) and isinstance(heads, int):
            length = own.get("attention.key_length", width // max(heads, 1))
        if isinstance(rotated, int) and isinstance(length, int):
            config["partial_rotary_factor"] = rotated / max(length, 1)
            rotated = length
    if length is None:
        return
    if own.get("attention.value_length", length) != length:
        raise ModelError(f"{prefix}attention.value_length differs from key_length: not supported")
    if rotated not in (None, length):
        raise ModelError(f"{prefix}rope.dimension_count is not the head size: not supported")
    config["head_dim"] = length


def _without_rope_factors(
    path: str, header: GgufHeader, config: dict[str, Any]
) -> tuple[TensorEntry, ...]:
    """Move the factors of LongRoPE from tensors to the configuration; return the other tensors."""
    found = {tensor.name: tensor for tensor in header.tensors}
    if config["model_type"] != "phi3" or not found.keys() >= set(_ROPE_FACTORS.values()):
        return header.tensors
    for key, name in _ROPE_FACTORS.items():
        config["rope_parameters"][key] = _few_floats(path, found[name])
    config["rope_parameters"]["rope_type"] = "longrope"
    return tuple(tensor for tensor in header.tensors if tensor.name not in _ROPE_FACTORS.values())


def _few_floats(path: str, entry: TensorEntry) -> list[float]:
    """Return the numbers of a short tensor; raises ModelError naming it if it is none."""
    if entry.type != "F32" or entry.num_bytes > _MAX_FACTOR_BYTES:
        raise ModelError(f"tensor {entry.name} has type {entry.type}: a few F32 are needed")
    with open(path, "rb") as file:
        file.seek(entry.offset)
        return array("f", file.read(entry.num_bytes)).tolist()


def _with_scales(path: str, tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """Return weights in NVFP4 together with their scales, as one tensor each.

    Raises ModelError naming a scale that does not fit or is no finite number.
    """
    named = {tensor.name: tensor for tensor in tensors}
    for name, weight in list(named.items()):
        if weight.type != "NVFP4" or not name.endswith(_WEIGHT):
            continue
        base = name.removesuffix(_WEIGHT)
        named.pop(base + _INPUT_SCALE, None)  # inputs are rounded by scales of their own
        if (scale := named.pop(base + _SCALE, None)) is None:
            continue
        numbers = _few_floats(path, scale)
        if len(numbers) not in (1, *weight.shape[:-2]):
            raise ModelError(
                f"tensor {scale.name} has shape {list(scale.shape)}, and {name} has "
                f"{list(weight.shape)}: one scale, or one of each expert, is needed"
            )
        wrong = [number for number in numbers if not math.isfinite(number)]
        if wrong:
            raise ModelError(f"tensor {scale.name} holds {wrong[0]:g}, and scales weights")
        rows = math.prod(weight.shape[:-1])
        codes = (rows, weight.num_bytes // max(rows, 1))
        parts = {
            "codes": TensorPart("U8", codes, weight.file, weight.offset, weight.num_bytes),
            "factors": TensorPart("F32", scale.shape, scale.file, scale.offset, scale.num_bytes),
        }
        named[name] = structs.replace(
            weight,
            num_bytes=weight.num_bytes + scale.num_bytes,
            packing="gguf_nvfp4",
            parts=parts,
            options={"rows": rows // len(numbers)},
        )
    return tuple(named.values())


def _add_gemma3(config: dict[str, Any], own: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Add what only Gemma 3 has: windows in five of six layers, without RoPE scaling."""
    num_layers = own["block_count"]
    config.setdefault("sliding_window", _GEMMA3_DEFAULT_WINDOW)
    config["layer_types"] = [
        "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(num_layers)
    ]
    config["rope_parameters"] = {
        "full_attention": rope,
        "sliding_attention": {"rope_theta": _GEMMA3_LOCAL_THETA, "rope_type": "default"},
    }


def _add_query_scale(config: dict[str, Any], num_layers: int, layers_of_27b: int) -> None:
    """Add the query scale of Gemma 2 and 3: that of the head size, except for the 27B models.

    GGUF files do not contain it; llama.cpp, too, recognises these models by their layers.
    """
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if num_layers == layers_of_27b and isinstance(heads, int) and isinstance(width, int):
        config["query_pre_attn_scalar"] = width // max(heads, 1)
    else:
        config["query_pre_attn_scalar"] = config.get("head_dim")


def _rope_parameters(own: Mapping[str, Any], prefix: str, theta: float) -> dict[str, Any]:
    """Return the rotary embedding under its names in config.json."""
    kind = own.get("rope.scaling.type", "none")
    rope = {"rope_theta": own.get("rope.freq_base", theta), "rope_type": "default"}
    if kind == "none":
        longrope = {
            "original_context_length": "original_max_position_embeddings",
            "attn_factor": "attention_factor",
        }
        if prefix == "phi3.":
            rope |= {
                hf_key: own[f"rope.scaling.{key}"]
                for key, hf_key in longrope.items()
                if f"rope.scaling.{key}" in own
            }
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{prefix}rope.scaling.type {shown(kind)} is not supported")
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    given = {
        hf_key: own[f"rope.scaling.{key}"]
        for key, hf_key in names.items()
        if f"rope.scaling.{key}" in own
    }
    return {**rope, "rope_type": kind, **given}


def _end_tokens(path: str, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    found = (gguf_tokenizer.token_id(path, metadata, key) for key in _END_KEYS)
    return tuple(dict.fromkeys(token for token in found if token is not None))
