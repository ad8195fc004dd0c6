"""A tiny random model of every family, as a Hugging Face folder and as llama.cpp's GGUF file.

The GGUF file is converted from the folder's tensors by what the `gguf` package and llama.cpp's
converter say about names, order of rows and metadata, not by the spec under test.
"""

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig

from tests.fakes.gguf_files import permute_heads
from tests.fakes.tiny_checkpoints import CONFIGS, has_experts, save_mxfp4, tiny_model
from tests.fakes.tiny_model_files import TOKENS, add_tokenizer, tokenizer_json
from worker.models.families import FAMILIES

Arrays = dict[str, npt.NDArray[Any]]
"""Numbers in float32, and blocks of MXFP4 and their scales in bytes."""

_FULL_AT: Final = {"layer_types": None, "num_hidden_layers": 4}
"""Four layers by the family's own pattern: a GGUF file cannot have another one."""
_WINDOW: Final = {"attention.sliding_window": "sliding_window"}
_LAYER_NORM: Final = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_EXPERTS: Final = {"expert_used_count": "num_experts_per_tok"}
_MANY_EXPERTS: Final = _EXPERTS | {
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LATENT: Final = _EXPERTS | {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "rope.dimension_count": "qk_rope_head_dim",
}
_DELTA_RULE: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_DELTA_VALUES: Final = {
    "full_attention_interval": 4,
    "rope.dimension_sections": [2, 1, 1, 0],
}
_DELTA_CHANGES: Final = {"layer_types": None}
"""A GGUF file has no other pattern than one layer with attention in four."""
_MAMBA2: Final = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_GROUPS: Final = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_QUERY_LATENT: Final = {"attention.q_lora_rank": "q_lora_rank"}
_GRANITE: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}


@dataclass(frozen=True)
class TinyGguf:
    """How llama.cpp writes the models of a family.

    keys: metadata beside the sizes, and where its values are in the configuration.
    values: metadata whose values are not in the configuration.
    changes: settings in which the model differs from that of tiny_checkpoints.py, because a GGUF
        file has no metadata for them.
    permuted: rows of query and key heads are in interleaved order.
    name: of the architecture, if it is not the family's first one.
    is_older: the file is of a version of the converter that left the projections of Qwen3-Next's
        linear attention as they are in the folder.
    """

    keys: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False
    name: str = ""
    is_older: bool = False


_OLMO3_ROPE: Final = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
_MINISTRAL3_ROPE: Final = _OLMO3_ROPE["full_attention"] | {
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_YARN_VALUES: Final = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
_YARN_OF_LATENTS: Final = _OLMO3_ROPE["full_attention"] | {"mscale": 0.7, "mscale_all_dim": 0.7}
_LATENT_YARN_VALUES: Final = _YARN_VALUES | {"rope.scaling.yarn_log_multiplier": 0.07}
GGUFS: Final[dict[str, TinyGguf]] = {
    "bamba": TinyGguf(
        _MAMBA2,
        {
            "attention.head_count_kv": [0, 2, 0, 0, 2],
            "rope.scaling.finetuned": True,
            "ssm.inner_size": 128,
        },
        permuted=True,
    ),
    "cohere2": TinyGguf(_WINDOW | _LAYER_NORM | {"logit_scale": "logit_scale"}, changes=_FULL_AT),
    "deepseek2": TinyGguf(
        {key: name for key, name in _LATENT.items() if key != "expert_weights_norm"},
        _LATENT_YARN_VALUES | {"expert_gating_func": 1, "leading_dense_block_count": 1},
    ),
    "deepseek3": TinyGguf(
        _LATENT | _GROUPS | _QUERY_LATENT,
        _LATENT_YARN_VALUES | {"expert_gating_func": 2, "leading_dense_block_count": 1},
        {"rope_parameters": _YARN_OF_LATENTS},
    ),
    "ernie45": TinyGguf(),
    "exaone4": TinyGguf(
        _WINDOW, {"attention.sliding_window_pattern": [True, True, True, False]}, _FULL_AT
    ),
    "falconh1": TinyGguf(_MAMBA2 | {"ssm.inner_size": "mamba_d_ssm"}),
    "gemma2": TinyGguf(
        _WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        changes={"query_pre_attn_scalar": 32},
    ),
    "gemma3": TinyGguf(
        _WINDOW,
        changes={"query_pre_attn_scalar": 32, "layer_types": None, "num_hidden_layers": 6},
    ),
    "glm": TinyGguf(),
    "glm4": TinyGguf(),
    "glm4moe": TinyGguf(
        _EXPERTS
        | {
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        {"expert_gating_func": 2, "nextn_predict_layers": 0},
    ),
    "glm4moelite": TinyGguf(
        _LATENT | _GROUPS | _QUERY_LATENT,
        {"expert_gating_func": 2, "leading_dense_block_count": 1},
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "gptoss": TinyGguf(
        _WINDOW
        | _EXPERTS
        | {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        _YARN_VALUES,
    ),
    "granite": TinyGguf(_GRANITE, permuted=True),
    "granitemoe": TinyGguf(
        _GRANITE | _EXPERTS | {"expert_count": "num_local_experts"}, permuted=True
    ),
    "granitehybrid": TinyGguf(
        _GRANITE
        | _MAMBA2
        | _EXPERTS
        | {
            "expert_count": "num_local_experts",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        {
            "attention.head_count_kv": [0, 0, 2, 0, 2],
            "rope.scaling.finetuned": False,
            "ssm.inner_size": 128,
        },
        permuted=True,
    ),
    "lfm2": TinyGguf(
        {"shortconv.l_cache": "conv_L_cache"},
        {"attention.head_count_kv": [0, 2, 0, 2], "feed_forward_length": 80},
    ),
    "lfm2moe": TinyGguf(
        _EXPERTS
        | {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
            "shortconv.l_cache": "conv_L_cache",
        },
        {"attention.head_count_kv": [0, 2, 0, 2], "expert_gating_func": 2},
        {"routed_scaling_factor": 1.0},
    ),
    "llama": TinyGguf(permuted=True),
    "mamba2": TinyGguf(
        {
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "num_heads",
        },
        {"ssm.inner_size": 128},
    ),
    "ministral": TinyGguf(changes={"layer_types": None, "sliding_window": 128}, permuted=True),
    "ministral3": TinyGguf(
        values=_YARN_VALUES
        | {
            "attention.temperature_scale": 0.5,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
        changes={"rope_parameters": _MINISTRAL3_ROPE},
        permuted=True,
    ),
    "mistral": TinyGguf(permuted=True),
    "mixtral": TinyGguf(_EXPERTS | {"expert_count": "num_local_experts"}, permuted=True),
    "nemotronh": TinyGguf(
        {
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        {
            "attention.head_count_kv": [0, 0, 0, 2, 0, 0, 2],
            "feed_forward_length": [0, 112, 0, 0, 112, 0, 0],
            "ssm.inner_size": 128,
        },
    ),
    "nemotronh-experts": TinyGguf(
        {
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group",
            "expert_shared_count": "n_shared_experts",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_used_count": "num_experts_per_tok",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "moe_latent_size": "moe_latent_size",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        {
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 64, 0, 64],
            "ssm.inner_size": 128,
        },
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        name="nemotron_h_moe",
    ),
    "olmo2": TinyGguf(),
    "olmo3": TinyGguf(
        _WINDOW,
        _YARN_VALUES | {"attention.sliding_window_pattern": [True, False, True]},
        {"rope_parameters": _OLMO3_ROPE},
    ),
    "olmoe": TinyGguf(_EXPERTS | {"expert_count": "num_experts"}),
    "phi3": TinyGguf(),
    "seedoss": TinyGguf(),
    "qwen2": TinyGguf(),
    "qwen2moe": TinyGguf(
        _MANY_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
    ),
    "qwen3": TinyGguf(),
    "qwen3moe": TinyGguf(_MANY_EXPERTS, changes={"norm_topk_prob": True}),
    "qwen35": TinyGguf(_DELTA_RULE, _DELTA_VALUES, _DELTA_CHANGES),
    "qwen35moe": TinyGguf(
        _DELTA_RULE
        | _MANY_EXPERTS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        _DELTA_VALUES,
        _DELTA_CHANGES,
    ),
    "qwen3next": TinyGguf(
        _DELTA_RULE
        | _MANY_EXPERTS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {
            "attention.recurrent_layers": [True, False, True, False, True],
            "full_attention_interval": 4,
        },
    ),
    "qwen3next-older": TinyGguf(
        _DELTA_RULE
        | _MANY_EXPERTS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        changes=_DELTA_CHANGES,
        name="qwen3next",
        is_older=True,
    ),
    "smollm3": TinyGguf(changes=_FULL_AT | {"no_rope_layers": None}, permuted=True),
    "starcoder2": TinyGguf({"attention.layer_norm_epsilon": "norm_epsilon"}),
}
"""By the family's module in worker.models.families."""


GENERATING = tuple(name for name, family in FAMILIES.items() if not family.is_encoder)
"""The architectures of decoders."""
IN_GGUF_FILES = (
    *(name for name in GENERATING if FAMILIES[name].gguf_names),
    "NemotronHForCausalLM-experts",
    "Qwen3NextForCausalLM-older",
)
"""Those with GGUF files; after a dash a variation whose files have another architecture."""


def _key_of(name: str) -> str:
    """Return the key in CONFIGS and GGUFS of an architecture, or of a variation of one."""
    architecture, dash, variation = name.partition("-")
    return f"{FAMILIES[architecture].module}{dash}{variation}"


def config_of_family(architecture: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a family's tiny model, with the vocabulary of TOKENS."""
    key = _key_of(architecture)
    config = CONFIGS[key if key in CONFIGS else key.partition("-")[0]]
    config = type(config)(**config.to_dict() | changes) if changes else copy.deepcopy(config)
    config.vocab_size = len(TOKENS)
    return config


def save_folder(architecture: str, folder: Path, **changes: Any) -> Any:
    """Save the model of a family with a tokenizer; return it in transformers.

    The experts of gpt-oss are in MXFP4.
    """
    model = tiny_model(config_of_family(architecture, **changes))
    if _key_of(architecture) == "gptoss":
        save_mxfp4(model, folder)
    else:
        model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return model


def save_gguf(
    architecture: str, folder: Path, kind: str = "F32", **changes: Any
) -> tuple[Path, Any]:
    """Save the model of a family as `folder`/model.gguf; return the path and the model.

    kind: how the file has matrices whose rows are whole blocks of it; the gguf package must be able
        to write it. changes: of the configuration.
    """
    rules = GGUFS[_key_of(architecture)]
    gguf_name = rules.name or FAMILIES[architecture].gguf_names[0]
    model = save_folder(architecture, folder / "folder", **rules.changes | changes)
    tensors = _converted(
        {
            name: (tensor if tensor.dtype == torch.uint8 else tensor.float()).numpy()
            for name, tensor in load_file(folder / "folder" / "model.safetensors").items()
        },
        gguf_name,
        model.config,
        rules,
    )
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, gguf_name)
    of_config = {key: getattr(model.config, name) for key, name in rules.keys.items()}
    for key, value in (_sizes(model.config) | rules.values | of_config).items():
        _add(writer, f"{gguf_name}.{key}", value)
    add_tokenizer(writer)
    for name, array in tensors.items():
        raw = gguf.GGMLQuantizationType.MXFP4 if array.dtype == np.uint8 else None
        stored_as = gguf.GGMLQuantizationType[kind]
        if array.ndim == 2 and array.shape[1] % gguf.GGML_QUANT_SIZES[stored_as][0] == 0:
            raw, array = stored_as, gguf.quants.quantize(array, stored_as)
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def _sizes(config: PretrainedConfig) -> dict[str, Any]:
    if not hasattr(config, "num_attention_heads"):  # Mamba-2
        return {
            "context_length": 1 << 20,
            "block_count": config.num_hidden_layers,
            "embedding_length": config.hidden_size,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        }
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}  # Nemotron-H: none
    rope = rope.get("full_attention", rope)
    values = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if rank := getattr(config, "kv_lora_rank", None):  # counts latents as keys and values
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + config.qk_rope_head_dim,
            "attention.value_length": rank,
        }
    if heads := getattr(config, "linear_num_value_heads", None):
        values["ssm.inner_size"] = heads * config.linear_value_head_dim
    if (epsilon := getattr(config, "rms_norm_eps", None)) is not None:
        values["attention.layer_norm_rms_epsilon"] = epsilon
    return values


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def _converted(
    tensors: Arrays, architecture: str, config: PretrainedConfig, rules: TinyGguf
) -> Arrays:
    """Return the tensors of a folder as llama.cpp's converter names and orders them."""
    (number,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    converted: Arrays = {}
    if architecture.startswith("qwen35"):
        tensors = with_tiled_heads(tensors, config)
    elif architecture == "qwen3next":
        tensors = _with_linear_attention(tensors, config, grouped=rules.is_older)
    tensors = _with_mamba2_layers(tensors, config)
    if architecture == "falcon-h1":
        tensors = _with_factors(tensors, config)
    for name, array in _with_stacks(_joined_mxfp4(_split_latents(tensors, config))).items():
        new = names.get_name(
            name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias")
        )
        assert new is not None, f"the gguf package does not know {name} of {architecture}"
        if re.search(r"\.[qk]_proj\.", name) and rules.permuted:
            is_query = ".q_proj." in name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            array = permute_heads(array, heads)
        adds_one = architecture.startswith(("gemma", "qwen35", "qwen3next"))
        if adds_one and name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + 1.0
        is_of_mamba = ".mamba." in name or ".mixer." in name
        converted[new] = array if is_of_mamba else array.squeeze()
    return converted


def _with_mamba2_layers(tensors: Arrays, config: PretrainedConfig) -> Arrays:
    """Return the tensors with those of Mamba-2 layers as llama.cpp has them.

    Decays are negative numbers instead of the logarithm of their size.
    """
    found: Arrays = {}
    for name, array in tensors.items():
        kind = name.rpartition("mamba.")[2] if ".mamba." in name else name.rpartition("mixer.")[2]
        if kind == "A_log":
            array = -np.exp(array)[:, None]
        elif kind == "D":
            array = array[:, None]
        elif kind == "conv1d.weight":
            array = array[:, 0]
        elif kind == "norm.weight":
            groups = getattr(config, "mamba_n_groups", None) or config.n_groups
            array = array.reshape(groups, -1)
        found[name] = array
    return found


def _with_factors(tensors: Arrays, config: PretrainedConfig) -> Arrays:
    """Return the tensors of Falcon-H1 multiplied by the factors of its configuration."""
    states = config.mamba_n_groups * config.mamba_d_state
    inner, heads = config.mamba_d_ssm, config.mamba_n_heads
    sizes = (inner, inner, states, states, heads)
    attention = config.attention_in_multiplier
    factors: dict[str, Any] = {
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
        "q_proj.weight": attention,
        "k_proj.weight": attention * config.key_multiplier,
        "v_proj.weight": attention,
        "o_proj.weight": config.attention_out_multiplier,
        "in_proj.weight": config.ssm_in_multiplier
        * np.repeat(config.ssm_multipliers, sizes)[:, None],
        "out_proj.weight": config.ssm_out_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    return {
        name: (array * factors.get(".".join(name.split(".")[-2:]), 1.0)).astype(np.float32)
        for name, array in tensors.items()
    }


def with_tiled_heads(tensors: Arrays, config: PretrainedConfig) -> Arrays:
    """Return the tensors of linear attention with value heads in the order of llama.cpp.

    The first value head of each key head comes first, then the second of each … Decays are
    negative numbers instead of the logarithm of their size.
    """
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = np.arange(heads).reshape(groups, -1).T.reshape(-1)
    keys = groups * config.linear_key_head_dim

    def tiled(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        of_heads = rows.reshape(heads, -1, *rows.shape[1:])[order]
        return np.ascontiguousarray(of_heads.reshape(rows.shape))

    found: Arrays = {}
    for name, array in tensors.items():
        kind = name.rpartition("linear_attn.")[2]
        if kind == "A_log":
            array = -np.exp(array)
        if kind in ("A_log", "dt_bias") or kind.startswith(("in_proj_z", "in_proj_a", "in_proj_b")):
            array = tiled(array)
        elif kind.startswith(("in_proj_qkv", "conv1d")):
            array = np.concatenate((array[: 2 * keys], tiled(array[2 * keys :])))
        elif kind == "out_proj.weight":
            array = np.ascontiguousarray(tiled(np.ascontiguousarray(array.T)).T)
        found[name] = array
    return found


def _with_linear_attention(tensors: Arrays, config: PretrainedConfig, *, grouped: bool) -> Arrays:
    """Return the tensors of Qwen3-Next's linear attention as llama.cpp has them.

    Rows of q, k, v and z, which a folder has key head by key head, are those of all heads one after
    the other, unless they are `grouped`. Decays are as in `with_tiled_heads`.
    """
    groups, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // groups * config.linear_value_head_dim
    found: Arrays = {}
    for name, array in tensors.items():
        layer, _, kind = name.rpartition("linear_attn.")
        if kind == "A_log":
            array = -np.exp(array)
        if kind == "in_proj_qkvz.weight" and not grouped:
            of_groups = array.reshape(groups, -1, array.shape[1])
            ends = [size, 2 * size, 2 * size + values]
            *qkv, z = (
                part.reshape(-1, array.shape[1]) for part in np.split(of_groups, ends, axis=1)
            )
            found[f"{layer}linear_attn.in_proj_qkv.weight"] = np.concatenate(qkv)
            found[f"{layer}linear_attn.in_proj_z.weight"] = z
        else:
            found[name] = array
    return found


def _split_latents(tensors: Arrays, config: PretrainedConfig) -> Arrays:
    """Return the tensors with the weights of keys and of values for each head, those of keys
    transposed: [heads, latent, columns of the query] and [heads, value, latent].
    """
    split: Arrays = {}
    for name, array in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            heads = array.reshape(config.num_attention_heads, -1, array.shape[1])
            keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
            split[name.replace("kv_b", "k_b")] = keys.transpose(0, 2, 1)
            split[name.replace("kv_b", "v_b")] = values
        else:
            split[name] = array
    return split


def _joined_mxfp4(tensors: Arrays) -> Arrays:
    """Return the tensors with blocks and scales of MXFP4 as bytes of GGUF's blocks.

    A scale comes before its block, whose byte i has the numbers i and i + 16; in folders it has
    the numbers 2i and 2i + 1.
    """
    joined: Arrays = {}
    for name, array in tensors.items():
        if name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            scales = tensors[f"{name}_scales"][..., None]
            numbers = np.stack([array & 15, array >> 4], axis=-1).reshape(*array.shape[:-1], 32)
            packed = numbers[..., :16] | numbers[..., 16:] << 4
            blocks = np.concatenate([scales, packed], axis=-1)
            joined[name] = blocks.reshape(*blocks.shape[:-2], -1)
        elif not name.endswith("_scales"):
            joined[name] = array
    return joined


def _with_stacks(tensors: Arrays) -> Arrays:
    """Return the tensors with the experts of each layer stacked, under names of one expert."""
    stacked: Arrays = {}
    experts: dict[str, dict[int, npt.NDArray[Any]]] = {}
    for name, array in tensors.items():
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name):
            group = f"{found[1]}.{found[3]}"
            if "feed_forward" in group:  # LFM2
                group = group.removeprefix("model.")
            group = re.sub(r"^backbone(.+)\.mixer\.", r"model\1.mlp.", group)  # Nemotron 3
            experts.setdefault(group, {})[int(found[2])] = array
        elif name.endswith("shared_mlp.input_linear.weight"):
            layer = name.removesuffix("shared_mlp.input_linear.weight")
            for part, rows in zip(("gate", "up"), np.split(array, 2), strict=True):
                stacked[f"{layer}mlp.shared_experts.{part}_proj.weight"] = rows
        elif name.endswith("block_sparse_moe.input_linear.weight"):  # Granite
            layer = name.removesuffix("input_linear.weight")
            stacked[f"{layer}experts.w1.weight"], stacked[f"{layer}experts.w3.weight"] = np.split(
                array, 2, axis=1
            )
        elif found := re.fullmatch(r"(.+\.experts)\.gate_up_proj(_bias)?", name):  # gpt-oss
            kind = "bias" if found[2] else "weight"
            for first, part in enumerate(("gate_proj", "up_proj")):
                stacked[f"{found[1]}.{part}.{kind}"] = array[:, first::2]
        elif name.endswith(("experts.down_proj_bias", "experts.down_proj", "sinks")):
            stacked[f"{name}.weight".replace("_bias.weight", ".bias")] = array
        elif name.endswith("e_score_correction_bias"):
            stacked[name.replace("_bias", ".bias")] = array
        elif name.endswith("expert_bias"):  # LFM2
            stacked[f"{name}.bias"] = array
        else:
            stacked[name] = array
    for name, parts in experts.items():
        stacked[name] = np.stack([parts[index] for index in sorted(parts)])
    return stacked


def is_mixture(architecture: str) -> bool:
    """Return whether the model of a family has experts."""
    config = CONFIGS[FAMILIES[architecture].module]
    return has_experts(config)
