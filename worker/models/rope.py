"""Rotary embeddings: their kinds, and reading them from a configuration.

Older files have `rope_theta` beside `rope_scaling`; newer ones have both in
`rope_parameters`. Families whose kinds of layers differ have a theta, or a `rope_parameters`, for
each kind.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader

_DEFAULT_THETA = 10_000.0
MROPE_AXES: Final = 3
"""Positions of a token of an image: of frame, row and column (M-RoPE; Wang et al., Qwen2-VL)."""


@dataclass(frozen=True)
class _Rotating:
    """What all rotary embeddings have that rotate.

    theta: base of the frequencies. axes: of M-RoPE, for each frequency which of the three positions
    of a token it counts; a token of text has one position three times. Empty: tokens have one.
    """

    theta: float
    axes: tuple[int, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class DefaultRope(_Rotating):
    """Rotary embedding with frequencies theta^(-2i/d) (Su et al., RoFormer, section 3.4)."""


@dataclass(frozen=True)
class LinearRope(_Rotating):
    """Rotary embedding with positions divided by `factor` (Chen et al., Position Interpolation)."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope(_Rotating):
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnRope(_Rotating):
    """YaRN (Peng et al., sections 3.2 to 3.4).

    beta_fast, beta_slow: rotations over the original length between which the ramp lies.
    truncate: round the ends of the ramp to whole dimensions.
    attention_factor: multiplies cosines and sines, so query times key gets its square.
    query_growth: the query at position p is multiplied by
        1 + query_growth * log(1 + floor(p / original_max_position)), as in Llama 4; 0: by 1.
    magnitude: multiplies all numbers of a head in latent attention, those that do not rotate, too;
        1 if the configuration has no mscale_all_dim.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    query_growth: float = 0.0
    magnitude: float = 1.0


@dataclass(frozen=True)
class FactorsRope(_Rotating):
    """Frequencies divided by factors [rotary_dim / 2], as in LongRoPE (Ding et al.).

    attention_factor: multiplies cosines and sines.
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class NoRope:
    """No rotation: the layer does not see positions (Yang et al., RoPE to NoPE and Back Again)."""


RotatingRope = DefaultRope | LinearRope | Llama3Rope | YarnRope | FactorsRope
Rope = RotatingRope | NoRope


@dataclass(frozen=True)
class KindOfRope:
    """The rotary embedding of the layers of one kind.

    kind: as in `layer_types`. theta_key: the older key of its theta, whose default is `theta`.
    scaled: whether `rope_scaling` applies to this kind.
    """

    kind: str
    theta_key: str
    theta: float
    scaled: bool


def rope_from_config(
    config: ConfigReader,
    max_position: int,
    theta: float = _DEFAULT_THETA,
    scales_queries: bool = False,
) -> RotatingRope:
    """Return the rotary embedding; raises ModelError for a kind or a key that is not supported.

    theta: the family's default. scales_queries: whether the family reads `llama_4_scaling_beta`.
    """
    older, newer = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    theta = config.number("rope_theta", theta)
    original = config.get("original_max_position_embeddings")
    key = "rope_scaling" if older else "rope_parameters"
    values: dict[str, Any] = dict(older or newer)
    if original is not None:
        values["original_max_position_embeddings"] = original
    growth = values.pop("llama_4_scaling_beta", None) if scales_queries else None
    rope = _rope_from_values(values, key, theta, max_position, config.max_model_len)
    if growth is None:
        return rope
    reader = ConfigReader({"llama_4_scaling_beta": growth}, key)
    if not isinstance(rope, YarnRope):
        raise reader.refusal("llama_4_scaling_beta", growth, "needs rope_type = 'yarn'")
    query_growth = reader.number("llama_4_scaling_beta")
    grows = (config.max_model_len or max_position) > rope.original_max_position
    return replace(rope, query_growth=query_growth if grows else 0.0)


def rotary_dim_from_config(config: ConfigReader, head_dim: int, default: float | None) -> int:
    """Return the dimensions of a head that rotate: `partial_rotary_factor` of all.

    default: the family's factor; None for a family that rotates whole heads. Raises ModelError for
    a factor that does not give an even number, or is not that of the family.
    """
    rope = ConfigReader(config.mapping("rope_parameters"), where="rope_parameters")
    config.get("partial_rotary_factor")
    reader = config if rope.get("partial_rotary_factor") is None else rope
    if default is None:
        reader.must_be("partial_rotary_factor", 1)
        return head_dim
    factor = reader.number("partial_rotary_factor", default)
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise reader.refusal(
            "partial_rotary_factor", factor, f"{rotary_dim} of {head_dim} dimensions cannot rotate"
        )
    return rotary_dim


def ropes_by_kind(
    config: ConfigReader, kinds: tuple[KindOfRope, ...], max_position: int
) -> dict[str, RotatingRope]:
    """Return the rotary embedding of each kind of layer; raises like rope_from_config."""
    older = config.mapping("rope_scaling")
    newer = ConfigReader(config.mapping("rope_parameters"), where="rope_parameters")
    ropes = {}
    for layers in kinds:
        theta = config.number(layers.theta_key, layers.theta)
        values, where = newer.mapping(layers.kind), f"rope_parameters: {layers.kind}"
        if older and layers.scaled:
            values, where = older, "rope_scaling"
        ropes[layers.kind] = _rope_from_values(
            values, where, theta, max_position, config.max_model_len
        )
    newer.refuse_unread()
    return ropes


def _rope_from_values(
    values: Mapping[str, Any],
    where: str,
    theta: float,
    max_position: int,
    max_model_len: int | None,
) -> RotatingRope:
    rope = ConfigReader(values, where, max_model_len)
    theta = rope.number("rope_theta", theta)
    kind = rope.get("type")
    kind = rope.get("rope_type") or kind or "default"
    rope.must_be("max_position_embeddings", max_position)
    rope.get("partial_rotary_factor")  # see rotary_dim_from_config
    axes = mrope_axes(rope)
    parsed = _parse(rope, kind, theta, max_position)
    rope.refuse_unread()
    return replace(parsed, axes=axes)


def mrope_axes(rope: ConfigReader) -> tuple[int, ...]:
    """Return `axes` of a rotary embedding; () without M-RoPE. Raises ModelError.

    mrope_section [2, 3, 3]      0 0 1 1 1 2 2 2
    interleaved                  0 1 2 0 1 2 1 2      1 and 2 at every third place, 0 elsewhere
    """
    sections, interleaved = rope.get("mrope_section"), rope.flag("mrope_interleaved", False)
    if sections is None:
        return ()
    if (
        not isinstance(sections, list)
        or len(sections) != MROPE_AXES
        or not all(type(each) is int and 0 <= each < 1 << 16 for each in sections)
    ):
        raise rope.refusal("mrope_section", sections, f"{MROPE_AXES} whole numbers are needed")
    if not interleaved:
        return tuple(axis for axis, number in enumerate(sections) for _ in range(number))
    axes = [0] * sum(sections)
    for axis in range(1, MROPE_AXES):
        for place in range(axis, min(MROPE_AXES * sections[axis], len(axes)), MROPE_AXES):
            axes[place] = axis
    return tuple(axes)


def _parse(rope: ConfigReader, kind: str, theta: float, max_position: int) -> RotatingRope:
    match kind:
        case "default" | "mrope":
            rope.get("original_max_position_embeddings")
            return DefaultRope(theta)
        case "linear":
            rope.get("original_max_position_embeddings")
            return LinearRope(theta, rope.number("factor"))
        case "llama3":
            return Llama3Rope(
                theta=theta,
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position=rope.integer(
                    "original_max_position_embeddings", max_position
                ),
            )
        case "yarn":
            return _yarn(rope, theta, max_position)
        case "longrope" | "su":
            return _longrope(rope, theta, max_position)
        case _:
            raise rope.refusal(
                "rope_type", kind, "supported: default, linear, llama3, longrope, yarn"
            )


def _yarn(rope: ConfigReader, theta: float, max_position: int) -> YarnRope:
    original = rope.integer("original_max_position_embeddings", max_position)
    factor = rope.number("factor", max_position / original)
    inferred, magnitude = _magnitude(factor, 1.0), 1.0
    if rope.get("mscale_all_dim"):
        magnitude = _magnitude(factor, rope.number("mscale_all_dim"))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        mscale, mscale_all = rope.number("mscale"), rope.number("mscale_all_dim")
        inferred = _magnitude(factor, mscale) / _magnitude(factor, mscale_all)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", inferred),
        magnitude=magnitude,
    )


def _longrope(rope: ConfigReader, theta: float, max_position: int) -> FactorsRope:
    """Return the factors for short or for long requests.

    The longest request decides, as K in the cache cannot be rotated again when a request becomes
    long.
    """
    original = rope.integer("original_max_position_embeddings", least=2)
    factor = rope.number("factor", max_position / original)
    extension = 1.0 + math.log(factor) / math.log(original) if factor > 1.0 else 1.0
    short, long = rope.numbers("short_factor"), rope.numbers("long_factor")
    is_long = (rope.max_model_len or max_position) > original
    return FactorsRope(
        theta,
        long if is_long else short,
        rope.number("attention_factor", math.sqrt(extension)),
    )


def _magnitude(factor: float, weight: float) -> float:
    """Return YaRN's correction of the attention temperature (section 3.4, equation 15)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
