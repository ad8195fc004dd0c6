"""The layers of a decoder as one call of a kernel (csrc/stack.cpp), by one team of threads.

Owns what the kernel is told about a model: made from its spec and its layers, once for each
range of row counts within which every product keeps its form. Takes the steps whose products are
all by kernels of ours, with the attention of such kernels; the bits are those of EagerLayers.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence

import torch

from worker.attention.base import AttentionBackend
from worker.attention.cpu import CpuAttention
from worker.kernels import (
    DTYPE_CODES,
    Kernels,
    Part,
    PartsOfLinear,
    RowNorm,
    Stack,
    StackLayer,
    StackRun,
    Turns,
    row_kernels,
)
from worker.layers.activation import GATE_CODES
from worker.layers.linear import Linear
from worker.layers.norm import KernelNorm, RMSNorm
from worker.layers.own_products import form_changes, own_parts
from worker.layers.residual import NormedAddition, ResidualLinear
from worker.models.layer_stack import EagerLayers, LayerStack, LayerWeights
from worker.models.spec import ModelSpec


def make_stacks(spec: ModelSpec, layers: Sequence[LayerWeights]) -> tuple[LayerStack, ...]:
    """What computes these layers here, the fastest first; the last takes every step."""
    partwise = EagerLayers(spec, layers)
    kernels = row_kernels()
    if kernels is None or layers[0].mlp_norm.device.type != "cpu":
        return (partwise,)
    return (KernelStack(kernels, spec, layers), partwise)


class KernelStack:
    """A LayerStack on csrc/stack.cpp."""

    def __init__(self, kernels: Kernels, spec: ModelSpec, layers: Sequence[LayerWeights]) -> None:
        self._kernels = kernels
        # The kernel has addresses of what these own.
        self._layers = layers
        products = [product for layer in layers for product in _products(layer)]
        self._from = sorted({1}.union(*map(form_changes, products)))
        self._descriptions = [StackDescription(spec, layers, num_rows) for num_rows in self._from]
        self._run = StackRun()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def takes(self, num_rows: int, attention: AttentionBackend) -> bool:
        return (
            isinstance(attention, CpuAttention)
            and num_rows > 0
            and self._description(num_rows).complete
        )

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        self._run.clocked = 0
        return self._call(hidden, positions, attention)

    def run_clocked(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, float, float]:
        """The same, with the seconds of products (rounding their inputs included) and attention."""
        run = self._run
        run.clocked, run.product_ns, run.attention_ns = 1, 0, 0
        return (
            self._call(hidden, positions, attention),
            run.product_ns * 1e-9,
            run.attention_ns * 1e-9,
        )

    def _call(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        assert isinstance(attention, CpuAttention)
        assert hidden.is_contiguous()
        assert positions.is_contiguous()
        assert (positions.shape, positions.dtype) == (hidden.shape[:1], torch.int64)
        stack = self._description(len(hidden)).structure
        assert hidden.shape[1] == stack.hidden_size
        run, dtype = self._run, DTYPE_CODES[hidden.dtype]
        run.dtype, run.num_rows, run.hidden = dtype, len(hidden), hidden.data_ptr()
        run.positions = positions.data_ptr()
        run.places = attention.places(len(hidden))
        run.scratch = self._memory(self._kernels.stack_bytes(stack, dtype, len(hidden)))
        first_wrong = self._kernels.stack_run(stack, run)
        if first_wrong < len(hidden):
            raise IndexError(f"position {int(positions[first_wrong])} is beyond the model's length")
        return hidden

    def _description(self, num_rows: int) -> "StackDescription":
        return self._descriptions[bisect_right(self._from, num_rows) - 1]

    def _memory(self, num_bytes: int) -> int:
        """Where so many bytes begin, which keep nothing from one step to the next."""
        if num_bytes > len(self._scratch):
            # torch aligns its memory to cache lines, which the kernels rely on.
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()


class StackDescription:
    """`worker.kernels.Stack` for steps of `num_rows` tokens; lives no longer than the layers.

    complete: whether kernels of ours multiply and norm all of it; if not, it must not be run.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[LayerWeights],
        num_rows: int,
    ) -> None:
        self.complete = True
        self._spec = spec
        self._num_rows = num_rows
        self._arrays: list[ctypes.Array[ctypes.Structure]] = []
        rotaries = list(dict.fromkeys(layer.rotary for layer in layers))
        described = [self._layer(layer, rotaries.index(layer.rotary)) for layer in layers]
        self._layers = (StackLayer * len(described))(*described)
        tables = [Turns(len(each.table), each.table.data_ptr()) for each in rotaries]
        self._tables = (Turns * len(tables))(*tables)
        self.structure = Stack(
            num_layers=len(layers),
            hidden_size=spec.hidden_size,
            inner_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            gate=GATE_CODES[spec.activation],
            num_turns=len(tables),
            turns=ctypes.addressof(self._tables),
            layers=ctypes.addressof(self._layers),
        )

    def _layer(self, layer: LayerWeights, turns: int) -> ctypes.Structure:
        hidden, inner = self._spec.hidden_size, self._spec.intermediate_size
        heads = self._spec.query_size + 2 * self._spec.kv_size
        output, output_norm = _end(layer.output)
        down, down_norm = _end(layer.down)
        return StackLayer(
            attention_norm=self._norm(layer.attention_norm),
            qkv=self._linear(layer.qkv, hidden, heads),
            query_norm=self._norm(*layer.head_norms[:1]),
            key_norm=self._norm(*layer.head_norms[1:]),
            output=self._linear(output, self._spec.query_size, hidden),
            attention_post_norm=self._norm(*output_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            gate_up=self._linear(layer.gate_up, hidden, 2 * inner),
            down=self._linear(down, inner, hidden),
            mlp_post_norm=self._norm(*down_norm),
            turns=turns,
        )

    def _norm(self, *norms: RMSNorm) -> ctypes.Structure:
        """One norm, or what stands for none."""
        structures = [
            each.arithmetic.row_norm for each in norms if isinstance(each.arithmetic, KernelNorm)
        ]
        self.complete &= len(structures) == len(norms)
        return structures[0] if structures else RowNorm()

    def _linear(self, linear: Linear, in_features: int, out_features: int) -> ctypes.Structure:
        parts = own_parts(linear, self._num_rows)
        array = (Part * len(parts))(*parts)
        self._arrays.append(array)
        self.complete &= (
            sum(part.out_features for part in parts) == out_features
            and len({part.form for part in parts}) == 1
        )
        return PartsOfLinear(in_features, out_features, len(parts), ctypes.addressof(array))


def _products(layer: LayerWeights) -> tuple[Linear, ...]:
    return (layer.qkv, _end(layer.output)[0], layer.gate_up, _end(layer.down)[0])


def _end(addition: ResidualLinear) -> tuple[Linear, tuple[RMSNorm, ...]]:
    """The product that ends a block, and the norm of it where there is one."""
    if isinstance(addition, NormedAddition):
        return addition.linear, (addition.norm,)
    return addition, ()  # type: ignore[return-value]  # every other is a Linear
