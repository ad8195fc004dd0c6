"""What makes the parts of a model's layers on one device: norms, gates, products, stacks.

The loader and the specs of parts ask it; `Device` (worker/device.py) is one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from worker.layers.activation import Activation, Gate, is_gated
from worker.layers.adapters import StepAdapters
from worker.layers.embedding import EmbeddingTable
from worker.layers.experts import DenseExperts, ExpertRanks, Experts, StackedWeights
from worker.layers.linear import DenseLinear, HeadLinears, Linear
from worker.layers.norm import Norm, NormWeight
from worker.layers.recurrence import Recurrence, RecurrenceShape
from worker.layers.tower_attention import TowerAttention
from worker.models.layer_stack import DecoderLayer, EagerLayers, LayerStack
from worker.models.moe import FusedMixture, Mixture


class LayerDevice(ABC):
    """The parts of layers on one device.

    torch_device: of its tensors.
    has_results: whether the host has a result when the call returns, without a wait.
    maps_tables: whether the rows of an embedding stay in the mapped file, and are converted on use.
    maps_blocks: whether they do so if they are quantisation blocks.
    """

    torch_device: torch.device
    has_results: bool
    maps_tables = False
    maps_blocks = False

    def block_table(
        self, block_type: str, stored: npt.NDArray[np.uint8], columns: int, dtype: torch.dtype
    ) -> EmbeddingTable:
        """Return a table of quantisation blocks, whose rows become `dtype` on use.

        stored: [rows, bytes of a row], as the file has them. Called only if `maps_blocks`.
        """
        raise AssertionError("blocks do not stay mapped")

    def copies_weight(self, dtype: torch.dtype) -> bool:
        """Return whether `linear` keeps a copy of the weight beside a table that is tied to it."""
        return False

    @abstractmethod
    def norm(self, weight: NormWeight) -> Norm:
        """Return the fastest norm with this weight."""

    @abstractmethod
    def gate(self, name: Activation, is_gated: bool = True) -> Gate:
        """Return the fastest gate with this activation."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Return the fastest layer for a dense weight [out, in] and bias [out]."""
        return DenseLinear(weight, bias)

    def step_adapters(self) -> StepAdapters:
        """Return what adds the adapters of a step's rows to the products of one model."""
        return StepAdapters()

    def adapter_head(self, weight: torch.Tensor) -> Linear:
        """Return the product of a head [out, in] that an adapter brings."""
        return self.linear(weight)

    def head_linears(self, linears: Sequence[Linear]) -> HeadLinears:
        """Return the products of all heads as one."""
        return HeadLinears(linears)

    def stacked_experts(
        self, stacked: StackedWeights, activation: Activation, ranks: ExpertRanks
    ) -> Experts:
        """Return the fastest implementation of stacked experts."""
        return DenseExperts(stacked, self.gate(activation, is_gated(activation)), ranks.first)

    def fused_mixture(self, mixture: Mixture) -> FusedMixture | None:
        """Return what computes a mixture in one call; None if nothing does."""
        return None

    @abstractmethod
    def recurrence(self, shape: RecurrenceShape, weights: object) -> Recurrence:
        """Return the fastest implementation of a recurrent layer of this kind and size.

        weights: as the kind has them.
        """

    def tower_attention(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> TowerAttention:
        """Return the fastest attention of a vision tower. dtype: of its activations."""
        return TowerAttention(num_heads, head_dim)

    def layer_stacks(
        self, layers: Sequence[DecoderLayer], hidden_size: int
    ) -> tuple[LayerStack, ...]:
        """Return the ways to compute these layers, the fastest first; the last takes any step."""
        return (EagerLayers(layers),)
