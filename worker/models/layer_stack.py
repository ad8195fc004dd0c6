"""The layers of a decoder and the order of operations in them.

EagerLayers calls each part by itself, on any device. `Device.layer_stacks` makes the stacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.attention.backend import AttentionBackend
from worker.layers.layer_progress import LayerProgress
from worker.layers.norm import Norm
from worker.layers.scratch import ByteBuffer
from worker.models.moe import MoeMlp
from worker.models.parts import ForwardContext, LayerPart


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer with its weights.

    mixer_norm, mlp_norm: before each part; without one, a part reads the residual itself.
    is_parallel: the MLP reads what the mixer reads.
    mixer_sum_norm, mlp_sum_norm: of the residual after each part; None: it goes on as it is.
    """

    mixer_norm: Norm | None
    mixer: LayerPart
    mlp_norm: Norm | None
    mlp: LayerPart
    is_parallel: bool = False
    mixer_sum_norm: Norm | None = None
    mlp_sum_norm: Norm | None = None


class LayerStack(Protocol):
    """All layers of a model."""

    def takes(self, num_rows: int, attention: AttentionBackend) -> bool:
        """Return whether the stack can compute a step of `num_rows` tokens with this backend."""

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Return hidden states [T, hidden] for embedded tokens of that shape, contiguous.

        positions: int64 [T], contiguous; raises IndexError for one beyond the model's length.
        `attention` has planned the step. The memory of `hidden` may be reused.
        """

    def record_experts(self, record: torch.Tensor) -> None:
        """Write the experts of each step's rows to `record`, int32 [mixtures, rows, top_k]."""

    def record_residuals(self, layers: Sequence[int], record: torch.Tensor) -> None:
        """Write the residual before some layers to `record`, [layers, rows, hidden], in each step.

        The number of all layers stands for what follows the last one.
        """

    def track_layers(self, progress: LayerProgress | None) -> None:
        """Wait before each layer and note it afterwards; None: no longer."""


class EagerLayers:
    """A LayerStack for every step; calls part after part."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = layers
        self._memory = ByteBuffer()
        self._residuals: dict[int, list[torch.Tensor]] = {}
        self._progress: LayerProgress | None = None

    def takes(self, num_rows: int, attention: AttentionBackend) -> bool:
        return True

    def record_experts(self, record: torch.Tensor) -> None:
        mixtures = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeMlp)]
        for mixture, part in zip(mixtures, record, strict=True):
            mixture.record = part

    def record_residuals(self, layers: Sequence[int], record: torch.Tensor) -> None:
        self._residuals = {}
        for layer, part in zip(layers, record, strict=True):
            self._residuals.setdefault(layer, []).append(part)

    def track_layers(self, progress: LayerProgress | None) -> None:
        self._progress = progress

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        progress = self._progress
        context = ForwardContext(positions, attention, self._memory)
        for number, layer in enumerate(self.layers):
            self._record(number, hidden)
            if progress is not None:
                progress.begin_layer(number)
            x = layer.mixer_norm(hidden) if layer.mixer_norm else hidden
            hidden = layer.mixer.add_to(hidden, x, context)
            if layer.mixer_sum_norm:
                hidden = layer.mixer_sum_norm(hidden)
            if not layer.is_parallel:
                x = layer.mlp_norm(hidden) if layer.mlp_norm else hidden
            hidden = layer.mlp.add_to(hidden, x, context)
            if layer.mlp_sum_norm:
                hidden = layer.mlp_sum_norm(hidden)
            if progress is not None:
                progress.end_layer(number)
        self._record(len(self.layers), hidden)
        return hidden

    def _record(self, layer: int, residual: torch.Tensor) -> None:
        """Copy the residual [T, hidden] before a layer to the records that want it."""
        for record in self._residuals.get(layer, ()):
            record[: len(residual)] = residual
