"""All layers of a decoder in one call of a C++ kernel, csrc/layers/stack.cpp.

StackDescription describes the layers to the kernel, once for each range of row counts within which
every product keeps its weight format. Steps run here if kernels of ours compute all products and
the attention; the bits are those of EagerLayers.
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
    LinearPart,
    RopeTable,
    RowNorm,
    Stack,
    StackLayer,
    StackLinear,
    StackRun,
    row_kernels,
)
from worker.layers.activation import GATE_CODES
from worker.layers.linear import Linear, ResidualLinear, format_thresholds, kernel_parts
from worker.layers.norm import KernelNorm, RMSNorm
from worker.models.attention import Attention
from worker.models.gated_mlp import GatedMlp
from worker.models.layer_stack import DecoderLayer, EagerLayers, LayerStack


def make_stacks(layers: Sequence[DecoderLayer], hidden_size: int) -> tuple[LayerStack, ...]:
    """Return the ways to compute these layers, the fastest first; the last one takes any step."""
    eager = EagerLayers(layers, hidden_size)
    kernels = row_kernels()
    if kernels is None or layers[0].mlp_norm.device.type != "cpu" or not is_describable(layers):
        return (eager,)
    return (KernelStack(kernels, hidden_size, layers), eager)


def is_describable(layers: Sequence[DecoderLayer]) -> bool:
    """Return whether csrc/layers/stack.cpp knows the parts of these layers, of one size each."""
    sizes = set()
    for layer in layers:
        mixer, mlp = layer.mixer, layer.mlp
        if not isinstance(mixer, Attention) or not isinstance(mlp, GatedMlp):
            return False
        if any(end.output.group.size > 1 for end in (mixer.output, mlp.down)):
            return False
        sizes.add((mixer.spec.shape, mlp.spec.intermediate_size, mlp.spec.activation))
    return len(sizes) == 1


class KernelStack:
    """A LayerStack on csrc/layers/stack.cpp."""

    def __init__(self, kernels: Kernels, hidden_size: int, layers: Sequence[DecoderLayer]) -> None:
        self._kernels = kernels
        # The kernel has addresses of what these own.
        self._layers = layers
        products = [product for layer in layers for product in _products(layer)]
        self._from = sorted({1}.union(*map(format_thresholds, products)))
        self._descriptions = [
            StackDescription(hidden_size, layers, num_rows) for num_rows in self._from
        ]
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
        self._run.is_timed = 0
        return self._call(hidden, positions, attention)

    def run_timed(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, float, float]:
        """Run the layers; also return the seconds of products, with rounding of inputs, and
        attention.
        """
        run = self._run
        run.is_timed, run.product_ns, run.attention_ns = 1, 0, 0
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
        run.attention_calls = attention.layer_calls(len(hidden))
        run.scratch = self._memory(self._kernels.stack_bytes(stack, dtype, len(hidden)))
        first_wrong = self._kernels.stack_run(stack, run)
        if first_wrong < len(hidden):
            raise IndexError(f"position {int(positions[first_wrong])} is beyond the model's length")
        return hidden

    def _description(self, num_rows: int) -> "StackDescription":
        return self._descriptions[bisect_right(self._from, num_rows) - 1]

    def _memory(self, num_bytes: int) -> int:
        """Return the address of scratch memory, whose contents do not survive a step."""
        if num_bytes > len(self._scratch):
            # torch aligns its memory to cache lines, which the kernels rely on.
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()


class StackDescription:
    """The layers as a `worker.kernels.Stack`, for steps of at least `num_rows` tokens.

    Valid while the layers live. complete: whether kernels of ours compute every product and norm;
    an incomplete description must not be run.
    """

    def __init__(self, hidden_size: int, layers: Sequence[DecoderLayer], num_rows: int) -> None:
        self.complete = True
        self._hidden_size = hidden_size
        self._num_rows = num_rows
        self._arrays: list[ctypes.Array[ctypes.Structure]] = []
        parts = [_known_parts(layer) for layer in layers]
        rotaries = list(dict.fromkeys(attention.rotary for attention, _ in parts))
        described = [
            self._layer(layer, rotaries.index(attention.rotary))
            for layer, (attention, _) in zip(layers, parts, strict=True)
        ]
        self._layers = (StackLayer * len(described))(*described)
        tables = [RopeTable(len(rotary.table), rotary.table.data_ptr()) for rotary in rotaries]
        self._tables = (RopeTable * len(tables))(*tables)
        attention, mlp = parts[0][0].spec, parts[0][1].spec
        self.structure = Stack(
            num_layers=len(layers),
            hidden_size=hidden_size,
            inner_size=mlp.intermediate_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            gate=GATE_CODES[mlp.activation],
            num_rope_tables=len(tables),
            rope_tables=ctypes.addressof(self._tables),
            layers=ctypes.addressof(self._layers),
        )

    def _layer(self, layer: DecoderLayer, rope_table: int) -> ctypes.Structure:
        attention, mlp = _known_parts(layer)
        hidden, inner = self._hidden_size, mlp.spec.intermediate_size
        heads = attention.spec.query_size + 2 * attention.spec.kv_size
        return StackLayer(
            attention_norm=self._norm(layer.mixer_norm),
            qkv=self._linear(attention.qkv, hidden, heads),
            query_norm=self._norm(*attention.head_norms[:1]),
            key_norm=self._norm(*attention.head_norms[1:]),
            output=self._linear(attention.output.linear, attention.spec.query_size, hidden),
            attention_post_norm=self._post_norm(attention.output),
            mlp_norm=self._norm(layer.mlp_norm),
            gate_up=self._linear(mlp.gate_up, hidden, 2 * inner),
            down=self._linear(mlp.down.linear, inner, hidden),
            mlp_post_norm=self._post_norm(mlp.down),
            rope_table=rope_table,
        )

    def _post_norm(self, end: ResidualLinear) -> ctypes.Structure:
        norm = end.output.norm
        return self._norm() if norm is None else self._norm(norm)

    def _norm(self, *norms: RMSNorm) -> ctypes.Structure:
        """Describe one norm; without an argument, a norm that the model does not have."""
        structures = [
            norm.arithmetic.row_norm for norm in norms if isinstance(norm.arithmetic, KernelNorm)
        ]
        self.complete &= len(structures) == len(norms)
        return structures[0] if structures else RowNorm()

    def _linear(self, linear: Linear, in_features: int, out_features: int) -> ctypes.Structure:
        parts = kernel_parts(linear, self._num_rows)
        array = (LinearPart * len(parts))(*parts)
        self._arrays.append(array)
        self.complete &= (
            sum(part.out_features for part in parts) == out_features
            and len({part.format for part in parts}) == 1
        )
        return StackLinear(in_features, out_features, len(parts), ctypes.addressof(array))


def _known_parts(layer: DecoderLayer) -> tuple[Attention, GatedMlp]:
    assert isinstance(layer.mixer, Attention)
    assert isinstance(layer.mlp, GatedMlp)
    return layer.mixer, layer.mlp


def _products(layer: DecoderLayer) -> tuple[Linear, ...]:
    attention, mlp = _known_parts(layer)
    return (attention.qkv, attention.output.linear, mlp.gate_up, mlp.down.linear)
