"""All layers of a decoder in one call of a C++ kernel, csrc/layers/stack.cpp.

StackDescription describes the layers to the kernel, once for each range of row counts within which
every product keeps its weight format. Steps run here if kernels of ours compute all products and
the attention; the bits are those of EagerLayers.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.attention.backend import AttentionBackend
from worker.attention.state_cache import AttentionWithStates
from worker.cpu.adapters import KernelAdapters
from worker.cpu.attention import CpuAttention
from worker.cpu.kernel_structures import (
    LatentStructure,
    RopeTable,
    RowNorm,
    Stack,
    StackAddition,
    StackLayer,
    StackLinear,
    StackRecurrence,
    StackRun,
)
from worker.cpu.kernels import DTYPE_CODES, Kernels
from worker.cpu.layers import GATE_CODES, KernelNorm
from worker.cpu.linear import ProductDescriptions, format_thresholds
from worker.cpu.moe import KERNEL, KernelMoe
from worker.cpu.recurrence import KernelRecurrence, describe_step
from worker.layers.adapters import AdaptedLinear
from worker.layers.layer_progress import HostProgress, LayerProgress
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.layers.scratch import ByteBuffer
from worker.models.attention import Attention
from worker.models.composite import NoPart, ParallelMixer
from worker.models.latent_attention import LatentAttention, LatentAttentionSpec
from worker.models.layer_stack import DecoderLayer, RowAddition
from worker.models.mlp import Mlp
from worker.models.moe import MoeMlp, report_mixtures
from worker.models.parts import LayerPart
from worker.models.recurrence import RecurrentMixer
from worker.models.rotary import RotaryEmbedding

Mixer = Attention | LatentAttention


@dataclass(frozen=True, slots=True)
class LayerMixers:
    """The mixers of a layer, in the order in which the kernel adds them to the residual.

    Factors are those of the input and of the output of each.
    """

    recurrent: RecurrentMixer | None = None
    attention: Mixer | None = None
    recurrent_factors: tuple[float, float] = (1.0, 1.0)
    attention_factors: tuple[float, float] = (1.0, 1.0)


def mixers_of(layer: DecoderLayer) -> LayerMixers | None:
    """Return the mixers of a layer; None if csrc/layers/stack.cpp does not know them."""
    mixer = layer.mixer
    if isinstance(mixer, NoPart):
        return LayerMixers()
    if isinstance(mixer, RecurrentMixer):
        return LayerMixers(recurrent=mixer)
    if isinstance(mixer, Mixer):
        return LayerMixers(attention=mixer)
    if not isinstance(mixer, ParallelMixer) or len(mixer.parts) != 2:
        return None
    (recurrent, *first), (attention, *second) = mixer.parts
    if not isinstance(recurrent, RecurrentMixer) or not isinstance(attention, Mixer):
        return None
    if not attention.output.output.is_plain:
        return None
    return LayerMixers(recurrent, attention, (first[0], first[1]), (second[0], second[1]))


def is_describable(layers: Sequence[DecoderLayer]) -> bool:
    """Return whether csrc/layers/stack.cpp knows these layers, alike in attention and MLP."""
    kinds = set()
    dense_kinds = set()
    for layer in layers:
        mixers, mlp = mixers_of(layer), layer.mlp
        if mixers is None:
            return False
        recurrent, attention = mixers.recurrent, mixers.attention
        if recurrent is not None and not (
            isinstance(recurrent.recurrence, KernelRecurrence)
            and recurrent.finish is None
            and recurrent.output.output.is_plain
        ):
            return False
        if attention is not None:
            if attention.output.output.group.size > 1:
                return False
            kinds.add((attention.spec.shape, _kind(attention), layer.is_parallel))
        elif layer.is_parallel:
            return False
        if isinstance(mlp, Mlp):
            spec = mlp.spec
            factors = (spec.gate_factor, spec.output_factor)
            dense_kinds.add((spec.intermediate_size, spec.activation, spec.is_gated, factors))
        elif not isinstance(mlp, NoPart) and not (
            isinstance(mlp, MoeMlp) and isinstance(mlp.fused, KernelMoe)
        ):
            return False
    return len(kinds) <= 1 and len(dense_kinds) <= 1


def _kind(mixer: Mixer) -> tuple[int | None, ...]:
    """Return what attentions of one shape have in common in all layers of a stack."""
    spec = mixer.spec
    if isinstance(spec, LatentAttentionSpec):
        return (spec.q_lora_rank, spec.qk_nope_head_dim, spec.v_head_dim)
    return (spec.joint_qk_norm, spec.output_gate)


class KernelStack:
    """A LayerStack on csrc/layers/stack.cpp."""

    def __init__(self, kernels: Kernels, hidden_size: int, layers: Sequence[DecoderLayer]) -> None:
        self._kernels = kernels
        # The kernel has addresses of what these own.
        self._layers = layers
        self._from = sorted({1}.union(*map(_thresholds, layers)))
        self._descriptions = [
            StackDescription(hidden_size, layers, num_rows) for num_rows in self._from
        ]
        self._run = StackRun()
        self._memory = ByteBuffer()
        self._record: torch.Tensor | None = None
        self._residuals: torch.Tensor | None = None
        self._progress: HostProgress | None = None
        self._has_mixtures = any(isinstance(layer.mlp, MoeMlp) for layer in layers)
        self._adapters = _adapters_of(layers[0])
        self._has_states = any(isinstance(part, RecurrentMixer) for part in _parts_of(layers))

    def record_experts(self, record: torch.Tensor) -> None:
        assert record.is_contiguous()
        assert record.dtype == torch.int32
        self._record = record
        self._run.chosen = record.data_ptr()
        self._run.chosen_stride = record.stride(0)

    def record_residuals(self, layers: Sequence[int], record: torch.Tensor) -> None:
        assert record.is_contiguous()
        self._recorded = np.array(layers, dtype=np.int64)
        self._residuals = record
        run = self._run
        run.num_recorded, run.recorded = len(layers), self._recorded.ctypes.data
        run.residuals, run.residual_stride = record.data_ptr(), record.stride(0)

    def track_layers(self, progress: LayerProgress | None) -> None:
        assert progress is None or isinstance(progress, HostProgress)
        self._progress = progress

    def takes(self, num_rows: int, attention: AttentionBackend) -> bool:
        kv = attention.attention if isinstance(attention, AttentionWithStates) else attention
        return (
            isinstance(kv, CpuAttention)
            and num_rows > 0
            and self._description(num_rows).complete
            and (self._adapters is None or not self._multiplies_outputs(self._adapters, num_rows))
        )

    def _multiplies_outputs(self, adapters: KernelAdapters, num_rows: int) -> bool:
        """Return whether an adapter of the step multiplies outputs, which the kernel adds at once
        to the residual.
        """
        return bool(adapters.groups) and adapters.description(num_rows).multiplies_outputs

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        additions: Sequence[RowAddition] = (),
    ) -> torch.Tensor:
        assert hidden.is_contiguous()
        assert positions.is_contiguous()
        assert (positions.shape[-1], positions.dtype) == (len(hidden), torch.int64)
        described = self._description(len(hidden))
        stack = described.structure
        assert hidden.shape[1] == stack.hidden_size
        assert self._record is None or len(hidden) <= self._record.shape[1]
        if self._residuals is not None:
            assert len(hidden) <= self._residuals.shape[1]
            assert self._residuals.dtype == hidden.dtype
        run, dtype = self._run, DTYPE_CODES[hidden.dtype]
        run.dtype, run.num_rows, run.hidden = dtype, len(hidden), hidden.data_ptr()
        run.positions, run.rotations = positions.data_ptr(), None
        if positions.dim() > 1:
            rotations = [rotary.at(positions) for rotary in described.rotaries]
            addresses = [each.data_ptr() for each in rotations]
            of_tables = (ctypes.c_void_p * len(addresses))(*addresses)
            run.rotations = ctypes.addressof(of_tables)
        run.num_additions = len(additions)
        if additions:
            added = [_described(each, hidden) for each in additions]
            of_rows = (StackAddition * len(added))(*added)
            run.additions = ctypes.addressof(of_rows)
        num_tokens = len(hidden)
        if self._has_states:
            assert isinstance(attention, AttentionWithStates), "the step has no states"
            step = describe_step(attention.states)
            assert attention.states.plan is not None
            assert attention.states.plan.query_start[-1] == len(hidden)
            run.recurrence = ctypes.addressof(step)
            num_tokens = int(attention.states.plan.token_start[-1])
        kv = attention.attention if isinstance(attention, AttentionWithStates) else attention
        assert isinstance(kv, CpuAttention)
        run.attention_calls = kv.layer_calls(len(hidden))
        num_bytes = self._kernels.stack_bytes(stack, dtype, len(hidden), num_tokens)
        run.scratch = self._memory.address(num_bytes)
        run.progress = 0 if self._progress is None else self._progress.address
        run.adapters = None
        if self._adapters is not None and self._adapters.groups:
            description = self._adapters.description(len(hidden))
            run.adapters = ctypes.addressof(description.structure)
            run.adapter_scratch = self._adapters.scratch(description)
        if self._has_mixtures:
            report_mixtures(KERNEL)
        first_wrong = self._kernels.stack_run(stack, run)
        if first_wrong < len(hidden):
            raise IndexError(f"position {int(positions[first_wrong])} is beyond the model's length")
        return hidden

    def _description(self, num_rows: int) -> "StackDescription":
        return self._descriptions[bisect_right(self._from, num_rows) - 1]


def _described(addition: RowAddition, hidden: torch.Tensor) -> StackAddition:
    """Describe an addition, which must live until the kernel returns, to the residual `hidden`."""
    values = addition.values
    assert values.is_contiguous()
    assert values.dtype == hidden.dtype
    num_layers, rest = divmod(values.shape[1], hidden.shape[1])
    assert rest == 0
    return StackAddition(addition.first, len(values), num_layers, values.data_ptr())


class StackDescription:
    """The layers as a `Stack`, for steps of at least `num_rows` tokens.

    Valid while the layers live. complete: whether kernels of ours compute every product and norm;
    an incomplete description must not be run. rotaries: whose tables it has.
    """

    def __init__(self, hidden_size: int, layers: Sequence[DecoderLayer], num_rows: int) -> None:
        self._hidden_size = hidden_size
        self._num_rows = num_rows
        self._products = ProductDescriptions()
        self._latents: list[LatentStructure] = []
        self._recurrences: list[StackRecurrence] = []
        self._norms_complete = self._mixtures_complete = True
        attentions = [part for part in _parts_of(layers) if isinstance(part, Mixer)]
        dense = next((layer.mlp.spec for layer in layers if isinstance(layer.mlp, Mlp)), None)
        rotaries = list(dict.fromkeys(attention.rotary for attention in attentions))
        self.rotaries = rotaries
        recurrent = [part.spec for part in _parts_of(layers) if isinstance(part, RecurrentMixer)]
        self._state_sizes = [spec.state_floats for spec in recurrent]
        self._log_sizes = [spec.logged_floats for spec in recurrent]
        described = [self._layer(layer, rotaries) for layer in layers]
        self.complete = self._products.complete and self._norms_complete and self._mixtures_complete
        self._layers = (StackLayer * len(described))(*described)
        tables = []
        for rotary in rotaries:
            scales = None if rotary.query_scales is None else rotary.query_scales.data_ptr()
            tables.append(RopeTable(len(rotary.table), rotary.table.data_ptr(), scales))
        self._tables = (RopeTable * len(tables))(*tables)
        shape = attentions[0].spec.shape if attentions else None
        self.structure = Stack(
            num_layers=len(layers),
            hidden_size=hidden_size,
            inner_size=0 if dense is None else dense.intermediate_size,
            num_heads=0 if shape is None else shape.num_heads,
            num_kv_heads=0 if shape is None else shape.num_kv_heads,
            head_dim=0 if shape is None else shape.head_dim,
            gate=0 if dense is None else GATE_CODES[dense.activation],
            is_gated=dense is not None and dense.is_gated,
            gate_factor=1.0 if dense is None else dense.gate_factor,
            output_factor=1.0 if dense is None else dense.output_factor,
            gates_attention=any(
                isinstance(each, Attention) and each.spec.output_gate for each in attentions
            ),
            is_parallel=layers[0].is_parallel,
            norms_heads_jointly=any(
                isinstance(each, Attention) and each.spec.joint_qk_norm for each in attentions
            ),
            num_rope_tables=len(tables),
            rope_tables=ctypes.addressof(self._tables),
            layers=ctypes.addressof(self._layers),
        )

    def _layer(self, layer: DecoderLayer, rotaries: Sequence[RotaryEmbedding]) -> StackLayer:
        mixers = mixers_of(layer)
        assert mixers is not None
        described = StackLayer(
            attention_norm=self._norm(layer.mixer_norm),
            attention_sum_norm=self._norm(layer.mixer_sum_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp_sum_norm=self._norm(layer.mlp_sum_norm),
            input_factor=1.0,
            output_factor=1.0,
            **self._mlp(layer.mlp),
        )
        if mixers.recurrent is not None:
            described.recurrence = self._recurrence(mixers.recurrent, *mixers.recurrent_factors)
        attention = mixers.attention
        if attention is not None:
            parts = (
                self._latent_attention(attention)
                if isinstance(attention, LatentAttention)
                else self._attention(attention)
            )
            for name, value in parts.items():
                setattr(described, name, value)
            described.attention_post_norm = self._norm(attention.output.output.norm)
            described.rope_table = rotaries.index(attention.rotary)
            described.attention_call = attention.layer
            described.input_factor, described.output_factor = mixers.attention_factors
        return described

    def _recurrence(self, mixer: RecurrentMixer, input_factor: float, output_factor: float) -> int:
        """Return the address of the description of a recurrent mixer."""
        shape, hidden, kernel = mixer.spec.shape, self._hidden_size, mixer.recurrence
        assert isinstance(kernel, KernelRecurrence)
        inputs = [
            self._linear(linear, hidden, size)
            for linear, size in zip(mixer.inputs, shape.input_sizes, strict=True)
        ]
        described = StackRecurrence(
            *inputs[:2],
            output=self._linear(mixer.output.linear, shape.num_outputs, hidden),
            input_factor=input_factor,
            output_factor=output_factor,
            state_offset=sum(self._state_sizes[: mixer.layer]),
            log_offset=sum(self._log_sizes[: mixer.layer]),
            layer=ctypes.addressof(kernel.structure),
            bytes=ctypes.cast(kernel.num_bytes, ctypes.c_void_p),
            run=ctypes.cast(kernel.kernel, ctypes.c_void_p),
        )
        self._recurrences.append(described)
        return ctypes.addressof(described)

    def _attention(self, attention: Attention) -> dict[str, ctypes.Structure | int | None]:
        spec, hidden = attention.spec, self._hidden_size
        query_norm, key_norm = attention.head_norms or (None, None)
        return {
            "qkv": self._linear(attention.qkv, hidden, spec.query_rows + 2 * spec.kv_size),
            "query_norm": self._norm(query_norm),
            "key_norm": self._norm(key_norm),
            "output": self._linear(attention.output.linear, spec.query_size, hidden),
            "sinks": None if attention.sinks is None else attention.sinks.data_ptr(),
        }

    def _latent_attention(self, attention: LatentAttention) -> dict[str, ctypes.Structure | int]:
        spec, hidden = attention.spec, self._hidden_size
        num_heads, rank = len(spec.own_heads), spec.kv_lora_rank
        queries, query_rank = num_heads * spec.query_dim, spec.q_lora_rank or 0
        heads = self._products.describe_heads
        latent = LatentStructure(
            query_rank=query_rank,
            plain_size=spec.qk_nope_head_dim,
            rotated_size=spec.qk_rope_head_dim,
            rank=rank,
            value_size=spec.v_head_dim,
            keys=heads(attention.keys, self._num_rows, spec.qk_nope_head_dim, rank),
            values=heads(attention.values, self._num_rows, rank, spec.v_head_dim),
        )
        if attention.query is not None:
            latent.query = self._linear(attention.query, query_rank, queries)
        self._latents.append(latent)
        return {
            "qkv": self._linear(attention.inputs, hidden, (query_rank or queries) + spec.head_dim),
            "query_norm": self._norm(attention.query_norm),
            "key_norm": self._norm(attention.key_norm),
            "output": self._linear(attention.output.linear, num_heads * spec.v_head_dim, hidden),
            "latent": ctypes.addressof(latent),
        }

    def _mlp(self, mlp: LayerPart) -> dict[str, ctypes.Structure | int]:
        hidden = self._hidden_size
        if isinstance(mlp, NoPart):
            return {}
        if isinstance(mlp, Mlp):
            inner = mlp.spec.intermediate_size
            return {
                "gate_up": self._linear(mlp.gate_up, hidden, len(mlp.spec.inputs) * inner),
                "down": self._linear(mlp.down.linear, inner, hidden),
                "mlp_post_norm": self._norm(mlp.down.output.norm),
            }
        assert isinstance(mlp, MoeMlp)
        assert isinstance(mlp.fused, KernelMoe)
        mixture = mlp.fused.description(self._num_rows)
        self._mixtures_complete &= mixture.complete
        return {
            "moe": ctypes.addressof(mixture.structure),
            "mlp_post_norm": self._norm(mlp.output.norm),
        }

    def _norm(self, norm: Norm | None) -> RowNorm:
        """Describe a norm; None is one that the model does not have."""
        if norm is None:
            return RowNorm()
        if not isinstance(norm, KernelNorm):
            self._norms_complete = False
            return RowNorm()
        return norm.row_norm

    def _linear(self, linear: Linear, in_features: int, out_features: int) -> StackLinear:
        return self._products.describe(linear, self._num_rows, in_features, out_features)


def _adapters_of(layer: DecoderLayer) -> KernelAdapters | None:
    """Return what the products of a layer ask for the adapters of a step; None without adapters."""
    for linear in _products_of(layer):
        if isinstance(linear, AdaptedLinear):
            assert isinstance(linear.adapters, KernelAdapters)
            return linear.adapters
    return None


def _parts_of(layers: Sequence[DecoderLayer]) -> Iterator[RecurrentMixer | Mixer]:
    """Yield the mixers of all layers, in their order."""
    for layer in layers:
        mixers = mixers_of(layer)
        assert mixers is not None
        for each in (mixers.recurrent, mixers.attention):
            if each is not None:
                yield each


def _products_of(layer: DecoderLayer) -> list[Linear]:
    """Return the products of a layer, without those of experts."""
    products: list[Linear] = []
    for mixer in _parts_of([layer]):
        products.append(mixer.output.linear)
        if isinstance(mixer, RecurrentMixer):
            products += mixer.inputs
        elif isinstance(mixer, LatentAttention):
            products += [mixer.inputs, *mixer.keys.linears, *mixer.values.linears]
            products += [] if mixer.query is None else [mixer.query]
        else:
            products.append(mixer.qkv)
    if isinstance(layer.mlp, Mlp):
        products += [layer.mlp.gate_up, layer.mlp.down.linear]
    return products


def _thresholds(layer: DecoderLayer) -> set[int]:
    """Return the numbers of rows from which on another format multiplies in this layer."""
    mlp = layer.mlp
    found = {rows for product in _products_of(layer) for rows in format_thresholds(product)}
    if isinstance(mlp, MoeMlp) and isinstance(mlp.fused, KernelMoe):
        found |= set(mlp.fused.thresholds)
    return found
