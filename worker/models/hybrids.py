"""What families with recurrent layers share: kinds of layers, and mixers from a configuration.

As worker/models/common.py, which has the rest of their decoders. All raise ModelError naming key
and value for what is missing or not supported.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from worker.layers.delta_rule import DeltaRuleShape
from worker.layers.mamba2 import GateNorm, Mamba2Shape
from worker.layers.short_conv import ShortConvShape
from worker.models.attention import AttentionSpec
from worker.models.common import (
    MAX_HEAD_DIM,
    attention_layers,
    decoder,
    gated_mlps,
    llama_attention,
)
from worker.models.config_reader import ConfigReader
from worker.models.delta_rule import DeltaRuleSpec
from worker.models.families.base import GROUPED_INPUTS
from worker.models.layout import FULL, LINEAR, QWEN_NORMS, layer_kinds
from worker.models.mamba2 import Mamba2Spec
from worker.models.parts import PartSpec
from worker.models.short_conv import ShortConvSpec
from worker.models.spec import ModelSpec

_MAX_TAPS: Final = 64
_OLDER_KINDS: Final = {"mamba": LINEAR, "mamba2": LINEAR, "attention": FULL}
"""What older configurations call kinds of layers."""
_NO_LIMITS: Final = ([0.0, math.inf], [0.0, None], [0.0, {"__float__": "Infinity"}])
"""Limits of a time step that limit nothing, as JSON has them."""


def hybrid_kinds(
    config: ConfigReader, supported: tuple[str, ...], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the kind of each layer, as `layer_kinds`; older names of kinds are understood."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not {*kinds}.isdisjoint(_OLDER_KINDS):
        renamed = [_OLDER_KINDS.get(kind, kind) for kind in kinds]
        config = ConfigReader(
            {"layer_types": renamed, "num_hidden_layers": config.get("num_hidden_layers")}
        )
    return layer_kinds(config, supported, default)


def hybrid_mixers(
    config: ConfigReader, kinds: Sequence[str], attention: AttentionSpec, recurrent: PartSpec
) -> list[PartSpec]:
    """Return the mixer of each layer: attention in those of the kind FULL, without a window.

    Raises ModelError if no layer has attention.
    """
    if FULL not in kinds:
        raise config.refusal("layer_types", list(set(kinds)), f"one {FULL} at least is needed")
    heads = attention_layers(config, attention, windows=[None] * len(kinds))
    return [head if kind == FULL else recurrent for kind, head in zip(kinds, heads, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Mamba2Keys:
    """What a configuration calls the sizes of Mamba-2 layers."""

    heads: str = "mamba_n_heads"
    head_size: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    chunk_size: str = "mamba_chunk_size"


MAMBA_SSM_KEYS: Final = Mamba2Keys(
    heads="num_heads",
    head_size="head_dim",
    groups="n_groups",
    state_size="state_size",
    taps="conv_kernel",
    bias="use_bias",
    conv_bias="use_conv_bias",
    chunk_size="chunk_size",
)
"""The names of the package mamba_ssm."""


def mamba2_mixer(
    config: ConfigReader,
    keys: Mamba2Keys,
    *,
    inner: int | None = None,
    eps: float,
    defaults: tuple[int, int, int] = (128, 1, 256),
    gate_norm: GateNorm = "norm of gated",
) -> Mamba2Spec:
    """Return a Mamba-2 layer.

    inner: channels of all heads; None for heads of the configured size. defaults: heads, groups and
    size of a state. The size of chunks changes no result here: the scan is token by token.
    """
    config.integer(keys.chunk_size, 256)
    config.must_be("time_step_limit", *_NO_LIMITS)
    of_llama_cpp = config.flag("of_llama_cpp", False)  # set for GGUF files
    num_heads, num_groups, state_size = (
        config.integer(key, default, most=MAX_HEAD_DIM)
        for key, default in zip((keys.heads, keys.groups, keys.state_size), defaults, strict=True)
    )
    if num_heads % num_groups:
        reason = f"must divide {keys.heads} = {num_heads}"
        raise config.refusal(keys.groups, num_groups, reason)
    given = config.get(keys.head_size)
    if inner is None:
        head_size = config.integer(keys.head_size, 64, most=MAX_HEAD_DIM)
    else:
        head_size = inner // num_heads
        if head_size * num_heads != inner:
            raise config.refusal(keys.heads, num_heads, f"must divide {inner} channels")
        if given not in (None, "auto", head_size):
            reason = f"{num_heads} heads of {inner} channels have {head_size}"
            raise config.refusal(keys.head_size, given, reason)
    bias = config.flag(keys.bias, False)
    return Mamba2Spec(
        hidden_size=config.integer("hidden_size"),
        shape=Mamba2Shape(
            num_heads=num_heads,
            head_size=head_size,
            num_groups=num_groups,
            state_size=state_size,
            num_taps=config.integer(keys.taps, 4, most=_MAX_TAPS),
            gate_norm=gate_norm,
        ),
        eps=eps,
        bias=bias,
        output_bias=bias,
        conv_bias=config.flag(keys.conv_bias, True),
        of_llama_cpp=of_llama_cpp,
    )


def short_conv_mixer(config: ConfigReader) -> ShortConvSpec:
    """Return a gated short convolution of LFM2."""
    hidden_size = config.integer("hidden_size")
    taps = config.integer("conv_L_cache", 3, least=2, most=_MAX_TAPS)
    return ShortConvSpec(
        hidden_size=hidden_size,
        shape=ShortConvShape(channels=hidden_size, num_taps=taps),
        bias=config.flag("conv_bias", False),
        of_llama_cpp=config.flag("of_llama_cpp", False),  # set for GGUF files
    )


def delta_rule_decoder(
    config: ConfigReader, mlps: Sequence[PartSpec] | None = None, *, grouped: bool = False
) -> ModelSpec:
    """Return the spec of a decoder of Qwen's in which most layers are gated delta-rule layers.

    The others have attention with a gate. Layers that predict further tokens are not loaded.

    mlps: gated MLPs if None. grouped: folders have the projections of the input key head by key
    head. Newer GGUF files of such a model have only those of the gates so, and value heads are in
    the order of the folder; in those of other models they are tiled.
    """
    config.must_be("hidden_act", "silu", "swish")
    config.must_be("attn_output_gate", True)
    config.get("mtp_num_hidden_layers")
    of_llama_cpp = config.flag("of_llama_cpp", False)  # set for GGUF files
    interval = config.integer("full_attention_interval", 4)
    kinds = layer_kinds(
        config, (LINEAR, FULL), lambda layer: LINEAR if (layer + 1) % interval else FULL
    )
    key_heads, value_heads = (
        config.integer(f"linear_num_{part}_heads", default, most=MAX_HEAD_DIM)
        for part, default in (("key", 16), ("value", 32))
    )
    if value_heads % key_heads:
        reason = f"must be a multiple of linear_num_key_heads = {key_heads}"
        raise config.refusal("linear_num_value_heads", value_heads, reason)
    mixer = DeltaRuleSpec(
        hidden_size=config.integer("hidden_size"),
        shape=DeltaRuleShape(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_size=config.integer("linear_key_head_dim", 128, most=MAX_HEAD_DIM),
            value_size=config.integer("linear_value_head_dim", 128, most=MAX_HEAD_DIM),
            num_taps=config.integer("linear_conv_kernel_dim", 4, most=_MAX_TAPS),
            is_tiled=of_llama_cpp and not grouped and key_heads < value_heads,
        ),
        eps=config.number("rms_norm_eps", 1e-6),
        grouped_inputs=grouped and (not of_llama_cpp or config.flag(GROUPED_INPUTS, False)),
        grouped_gates=grouped,
        of_llama_cpp=of_llama_cpp,
    )
    attention = replace(
        llama_attention(
            config,
            head_dim=config.integer("head_dim", 256),
            rotary_fraction=0.25,
            bias=config.flag("attention_bias", False),
        ),
        qk_norm=True,
        output_gate=True,
    )
    mixers = hybrid_mixers(config, kinds, attention, mixer)
    return replace(
        decoder(config, mixers, mlps or gated_mlps(config)),
        norms=QWEN_NORMS,
        norms_add_one=True,
        num_unused_layers=config.integer("num_nextn_predict_layers", 0, least=0),
        unused_prefixes=("mtp.",),
    )
