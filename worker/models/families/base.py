"""What the file of a family says of it: its names, its configuration and its GGUF files.

Without torch: `deploy` reads the names and the metadata of GGUF files, workers call `spec`, which
imports the arithmetic of worker/models where it is called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from proto.errors import ModelError, shown
from worker.models.config_reader import ConfigReader
from worker.models.layout import FULL, LINEAR

if TYPE_CHECKING:
    from worker.models.spec import ModelSpec as ModelSpec
else:
    ModelSpec = Any
    """What `spec` of a family returns; its module imports torch."""

WINDOW: Final = "attention.sliding_window"
WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
WINDOWED_BASE: Final = "rope.freq_base_swa"
NORM_EPS: Final = "attention.layer_norm_epsilon"
QUERY_BIAS: Final = "blk.0.attn_q.bias"
"""A tensor that files have whose projections of the attention have biases."""
EXPERT_KEYS: Final = {
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
GATING: Final = "expert_gating_func"
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Values of expert_gating_func: how the weights of experts are computed from their logits."""

LATENT_KEYS: Final = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
KEY_LENGTH, VALUE_LENGTH = "attention.key_length_mla", "attention.value_length_mla"
"""Lengths of latent attention's heads. In older files attention.key_length and value_length are
these lengths, in newer ones those of the latents."""
YARN_LOG: Final = "rope.scaling.yarn_log_multiplier"

_DELTA_RULE_KEYS: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
VALUES_OF_ALL_HEADS: Final = "ssm.inner_size"
RECURRENT_LAYERS: Final = "attention.recurrent_layers"
"""Whether each layer is a recurrent one; older files have only the interval."""
GROUPED_INPUTS: Final = "linear_grouped_inputs"
"""Key of config.json that only GGUF files set: see DeltaRuleSpec."""
MAMBA2_KEYS: Final = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
ROTATES: Final = "rope.scaling.finetuned"
"""Whether queries and keys of a hybrid rotate."""
KV_HEADS: Final = "attention.head_count_kv"
IMAGE_SECTIONS: Final = "rope.dimension_sections"
"""Frequencies of a head that rotate by the time, row and column of an image; a fourth is 0."""
DEEPSTACK_LAYERS: Final = "n_deepstack_layers"
"""Layers to which an image adds rows; its vision part says the same."""

DEFAULT_THETA: Final = 10_000.0


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


def add_head_dim(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the head size; without one, config.json means hidden_size / num_attention_heads."""
    rotated = metadata.keys.get("rope.dimension_count")
    set_head_dim(config, metadata, metadata.keys.get("attention.key_length", rotated), rotated)


def set_head_dim(config: dict[str, Any], metadata: GgufMetadata, length: Any, rotated: Any) -> None:
    """Set the head size if the file has one; heads rotate as a whole, and values are as long."""
    if length is None:
        return
    prefix = metadata.prefix
    if metadata.keys.get("attention.value_length", length) != length:
        raise ModelError(f"{prefix}attention.value_length differs from key_length: not supported")
    if rotated not in (None, length):
        raise ModelError(f"{prefix}rope.dimension_count is not the head size: not supported")
    config["head_dim"] = length


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """The GGUF files of one family, beside what those of all families have.

    name: of the architecture in the files; "" if only models that pool are supported.
    pooling_name: that of models that only pool, where it is another one. other_names: further ones
        with the same metadata.
    is_marked: recognises the metadata of this family among files of others with the same name.
    keys: metadata key → key of config.json with the same meaning.
    other_keys: metadata keys that `add_heads` or `finish` reads, or that may be ignored.
    gating: of a family with a mixture of experts, its value of expert_gating_func. EXPERT_KEYS are
        among its keys then. 0: it has no experts.
    optional_keys: metadata keys that other families require.
    settings: keys of config.json that hold for all models of the family, and that files leave out.
    flags: key of config.json → name of a tensor. The key is true for files with this tensor.
    rope_theta: base of the rotary embedding if the file has none.
    add_heads: adds the sizes of heads; not called for encoders.
    finish: adds the rest, after everything else.
    """

    name: str
    pooling_name: str = ""
    other_names: tuple[str, ...] = ()
    is_marked: Callable[[Mapping[str, Any]], bool] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    other_keys: tuple[str, ...] = ()
    gating: int = 0
    optional_keys: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    rope_theta: float = DEFAULT_THETA
    add_heads: ConfigStep = add_head_dim
    finish: ConfigStep | None = None

    @property
    def config_keys(self) -> Mapping[str, str]:
        """`keys` with those of experts."""
        return {**EXPERT_KEYS, **self.keys} if self.gating else self.keys


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, which its file has as FAMILY.

    models: the architectures of config.json, and for each the models that have it, for people.
    model_types: values of `model_type`; that of GGUF files is the first.
    spec: returns the arithmetic of a configuration.
    gguf: its GGUF files; None if they are not supported.
    is_encoder: it attends in both directions and only pools.
    wrapped_types: `model_type` of language models inside models for images that have this
        arithmetic for text, beside the `model_type` of the architecture itself.
    """

    models: Mapping[str, str]
    model_types: tuple[str, ...]
    spec: Callable[[ConfigReader], ModelSpec]
    gguf: Gguf | None = None
    is_encoder: bool = False
    wrapped_types: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The name of the family's file."""
        return self.spec.__module__.rpartition(".")[2]

    @property
    def gguf_names(self) -> tuple[str, ...]:
        """All names in GGUF files."""
        gguf = self.gguf
        if gguf is None:
            return ()
        return tuple(filter(None, (gguf.name, *gguf.other_names, gguf.pooling_name)))


def add_partially_rotated_heads(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the head size and the share of a head that rotates (rope.dimension_count)."""
    rotated = metadata.keys.get("rope.dimension_count")
    length = metadata.keys.get("attention.key_length", rotated)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if isinstance(width, int) and isinstance(heads, int):
        length = metadata.keys.get("attention.key_length", width // max(heads, 1))
    if isinstance(rotated, int) and isinstance(length, int):
        config["partial_rotary_factor"] = rotated / max(length, 1)
        rotated = length
    set_head_dim(config, metadata, length, rotated)


def add_latent_heads(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the sizes of latent attention's heads, and how YaRN scales their queries."""
    keys, rope = metadata.keys, config["rope_parameters"]
    config.pop("num_key_value_heads", None)  # 1 in newer files, which count latents
    length = keys.get(KEY_LENGTH, keys.get("attention.key_length"))
    value = keys.get(VALUE_LENGTH, keys.get("attention.value_length"))
    rotated = keys.get("rope.dimension_count")
    if not all(type(size) is int for size in (length, value, rotated)) or length <= rotated:
        raise ModelError(
            f"{metadata.prefix}{KEY_LENGTH} {shown(length)}, value_length_mla {shown(value)} and "
            f"rope.dimension_count {shown(rotated)}: lengths of latent attention's heads are needed"
        )
    config["qk_nope_head_dim"], config["v_head_dim"] = length - rotated, value
    if config.get("n_group", 1) > 1 and config["model_type"] == "deepseek_v2":
        config["topk_method"] = "group_limited_greedy"
    if YARN_LOG in keys and rope["rope_type"] == "yarn":
        # A file has 0.1 times this, and no other mscale: cosines and sines are not scaled.
        rope["mscale"] = rope["mscale_all_dim"] = 10 * keys[YARN_LOG]


def add_layer_types(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add which layers have a window, if the file lists them."""
    pattern = metadata.keys.get(WINDOW_PATTERN)
    if isinstance(pattern, list):
        config["layer_types"] = [
            "sliding_attention" if has_window else "full_attention" for has_window in pattern
        ]


def set_window_theta(config: dict[str, Any], theta: float) -> None:
    """Let layers with a window rotate with this base and without a scaling."""
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_theta": theta, "rope_type": "default"},
    }


def add_query_scale(config: dict[str, Any], is_27b: bool) -> None:
    """Add the query scale of Gemma 2 and 3: that of the head size, except for the 27B models.

    GGUF files do not contain it; llama.cpp, too, recognises these models by their layers.
    """
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if is_27b and isinstance(heads, int) and isinstance(width, int):
        config["query_pre_attn_scalar"] = width // max(heads, 1)
    else:
        config["query_pre_attn_scalar"] = config.get("head_dim")


def recurrent_head_size(metadata: GgufMetadata) -> int:
    """Return the values, or channels, of a head of a recurrent layer."""
    size, heads = (metadata.keys.get(key) for key in (VALUES_OF_ALL_HEADS, "ssm.time_step_rank"))
    if type(size) is not int or type(heads) is not int or heads < 1 or size % heads:
        raise ModelError(
            f"{metadata.prefix}{VALUES_OF_ALL_HEADS} {shown(size)} and ssm.time_step_rank "
            f"{shown(heads)}: the values of all heads and the number of these heads are needed"
        )
    return size // heads


def finish_delta_rule(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the size of a value head, the kinds of layers if the file lists them, and that weights
    are as llama.cpp's converter leaves them."""
    config["linear_value_head_dim"] = recurrent_head_size(metadata)
    recurrent, num_layers = metadata.keys.get(RECURRENT_LAYERS), config["num_hidden_layers"]
    if isinstance(recurrent, list):  # layers that predict further tokens come last
        config["layer_types"] = [LINEAR if each else FULL for each in recurrent[:num_layers]]
    config["of_llama_cpp"] = True


def add_image_sections(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add which frequencies rotate by which position of an image's tokens, if the file says so."""
    sections = metadata.keys.get(IMAGE_SECTIONS)
    if isinstance(sections, list) and any(sections):
        if any(sections[3:]):
            raise ModelError(f"{metadata.prefix}{IMAGE_SECTIONS} {shown(sections)}: not supported")
        config["rope_parameters"]["mrope_section"] = sections[:3]


def add_interleaved_sections(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the same of models in which these frequencies alternate."""
    add_image_sections(config, metadata)
    if "mrope_section" in config["rope_parameters"]:
        config["rope_parameters"]["mrope_interleaved"] = True


def finish_delta_rule_of_images(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add what `finish_delta_rule` and `add_interleaved_sections` do."""
    finish_delta_rule(config, metadata)
    add_interleaved_sections(config, metadata)


DELTA_RULE_GGUF: Final = Gguf(
    name="",
    keys=_DELTA_RULE_KEYS,
    other_keys=(VALUES_OF_ALL_HEADS, RECURRENT_LAYERS),
    add_heads=add_partially_rotated_heads,
    finish=finish_delta_rule,
)
"""What the GGUF files of families with delta-rule layers have in common."""


def layers_with_attention(config: dict[str, Any], metadata: GgufMetadata) -> list[bool]:
    """Return which layers have attention, and set its number of KV heads: others have 0."""
    heads = metadata.keys.get(KV_HEADS)
    num_layers = config["num_hidden_layers"]
    if isinstance(heads, list):
        # Layers that predict further tokens come last.
        heads = heads[: max(num_layers, len(heads) - config.get("num_nextn_predict_layers", 0))]
    if not isinstance(heads, list) or len(heads) != num_layers or len({*heads} - {0}) != 1:
        raise ModelError(
            f"{metadata.prefix}{KV_HEADS} {shown(heads)}: {num_layers} numbers are needed, all "
            "equal but for those that are 0"
        )
    config["num_key_value_heads"] = max(heads)
    return [count > 0 for count in heads]


def add_mamba_expansion(
    config: dict[str, Any], metadata: GgufMetadata, key: str = "mamba_expand"
) -> None:
    """Add how many channels a Mamba-2 layer has for each of the hidden size."""
    inner, hidden = metadata.keys.get(VALUES_OF_ALL_HEADS), config["hidden_size"]
    if type(inner) is not int or type(hidden) is not int or hidden < 1 or inner % hidden:
        raise ModelError(
            f"{metadata.prefix}{VALUES_OF_ALL_HEADS} {shown(inner)}: a multiple of "
            f"embedding_length {shown(hidden)} is needed"
        )
    config[key] = inner // hidden


def add_heads_of_width(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the head size, without one of the file hidden_size / num_attention_heads."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    usual = width // max(heads, 1) if isinstance(width, int) and isinstance(heads, int) else None
    length = metadata.keys.get("attention.key_length", usual)
    set_head_dim(config, metadata, length, metadata.keys.get("rope.dimension_count"))
