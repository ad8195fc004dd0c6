"""Rotary position embedding of query and key heads (Su et al., RoFormer, section 3.4).

Dimension i of a head is rotated together with dimension i + d/2:

    head       [ a | b ]
    result     [ a * cos - b * sin | b * cos + a * sin ]

If only some dimensions of a head rotate, the others have an angle of 0; models.parts.HeadRows says
where they lie. RotaryEmbedding is the table of cosines and sines. Attention backends rotate queries
and keys themselves: the C++ kernels on the way to the pages, others by `rotate`.
"""

import math

import torch

from worker.attention.backend import Rotation
from worker.models.rope import (
    MROPE_AXES,
    DefaultRope,
    FactorsRope,
    LinearRope,
    Llama3Rope,
    NoRope,
    Rope,
    RotatingRope,
    YarnRope,
)


class RotaryEmbedding:
    """Cosines and sines of every position up to the model's length.

    rotary_dim: dimensions of a head that rotate; 0: all of them.
    """

    def __init__(
        self,
        rope: Rope,
        head_dim: int,
        max_position: int,
        device: torch.device,
        rotary_dim: int = 0,
    ) -> None:
        rotary_dim = rotary_dim or head_dim
        table = torch.zeros(max_position, 2, head_dim // 2)
        table[:, 0] = 1.0
        if not isinstance(rope, NoRope):
            frequencies, magnitude = inverse_frequencies(rope, rotary_dim)
            angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
            table[:, 0, : rotary_dim // 2] = angles.cos() * magnitude
            table[:, 1, : rotary_dim // 2] = angles.sin() * magnitude
        axes = () if isinstance(rope, NoRope) else rope.axes
        self._columns = [
            torch.tensor([i for i, each in enumerate(axes) if each == axis], device=device)
            for axis in (range(MROPE_AXES) if axes else ())
        ]
        self.table = table.to(device)
        """Float32 [max_position, 2, head_dim / 2], contiguous."""
        self.query_scales: torch.Tensor | None = None
        """Factor of the query at each position, float32 [max_position]; None: all are 1."""
        if isinstance(rope, YarnRope) and rope.query_growth:
            lengths = torch.arange(max_position) // rope.original_max_position
            scales = 1.0 + rope.query_growth * lengths.float().log1p()
            self.query_scales = scales.to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of each token, called once per step.

        positions: int64 [T], or [3, T] where some tokens have three different ones (M-RoPE).
        """
        if positions.dim() == 1:
            return self.table.index_select(0, positions)
        rotation = self.table.index_select(0, positions[0])
        for places, columns in zip(positions[1:], self._columns[1:], strict=True):
            rotation[..., columns] = self.table.index_select(0, places)[..., columns]
        return rotation


def rotate(heads: torch.Tensor, rotation: Rotation, first_dim: int = 0) -> torch.Tensor:
    """Return heads [T, n, head_dim] rotated by the positions of their tokens, in a new tensor.

    first_dim: dimensions before it do not rotate.
    """
    cosines, sines = rotation[:, None].unbind(2)
    wide = heads.float()
    first, second = wide[..., first_dim:].chunk(2, dim=-1)
    # addcmul rounds once less than a product and a sum.
    turned = (
        (first * cosines).addcmul_(second, sines, value=-1.0),
        (second * cosines).addcmul_(first, sines),
    )
    return torch.cat((wide[..., :first_dim], *turned), dim=-1).to(heads.dtype)


def inverse_frequencies(rope: RotatingRope, rotary_dim: int) -> tuple[torch.Tensor, float]:
    """Return radians per position, float32 [rotary_dim / 2], and a factor of cosines and sines."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope:
        case DefaultRope():
            return frequencies, 1.0
        case LinearRope():
            return frequencies / rope.factor, 1.0
        case Llama3Rope():
            return _llama3(rope, frequencies), 1.0
        case YarnRope():
            return _yarn(rope, frequencies, rotary_dim), rope.attention_factor
        case FactorsRope():
            return frequencies / torch.tensor(rope.factors), rope.attention_factor


def _llama3(rope: Llama3Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, interpolate linearly between."""
    rotations = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * (frequencies / rope.factor) + kept * frequencies


def _yarn(rope: YarnRope, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Interpolate over the dimensions instead (YaRN, section 3.2)."""

    def dimension_turning(rotations: float) -> float:
        length = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * interpolated + frequencies * (1.0 - interpolated)
