"""A CUDA device for a whole worker, on the CPU: torch's functions with a FakeDevice as "cuda".

Tensors created on or moved to the device belong to a FakeDevice and report the device "cuda", so
code that depends on the device behaves as it would on a GPU. Weights are copied inside `loading`,
where synchronous copies are allowed; at other times copies of host numbers are refused. Matrix
products, also on the host, are summed in float64, so that a row's result does not depend on the
size of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tests.fakes.fake_device import DeviceError, DeviceTensor, FakeDevice, on_host
from tests.worker.reference.sorted_pairs import sorted_pairs
from worker.attention.kv_cache import StateShape
from worker.attention.state_cache import StatePlan
from worker.cuda.layers.adapter_slots import ProductSlots, SlotAdapters, StepRows
from worker.cuda.layers.recurrence import (
    TritonDeltaRule,
    TritonMamba2,
    TritonRecurrence,
    TritonShortConv,
)
from worker.cuda.layers.triton_codes import CodedWeight, TritonCodedLinear
from worker.cuda.layers.triton_experts import PairBlocks, Tile, TritonExperts
from worker.cuda.states import CudaStates, StateStep
from worker.layers.delta_rule import DeltaRuleShape
from worker.layers.mamba2 import Mamba2Shape
from worker.layers.scratch import ByteBuffer
from worker.layers.short_conv import ShortConvShape
from worker.reference.recurrence import RECURRENCES

COPYING = ("tensor", "as_tensor", "asarray")
"""Functions of torch that create a tensor from host data."""
CUDA = torch.device("cuda", 0)
_DEVICE: Any = torch.Tensor.device


class FakeCuda(TorchFunctionMode):
    """A context that is active in one thread. device: the FakeDevice behind "cuda"."""

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice()
        self._is_loading = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Allow copies from any host memory, done immediately."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = self.device
        if getattr(func, "__self__", None) is _DEVICE and device.holds(args[0]):
            return CUDA
        name = getattr(func, "__name__", "")
        if name == "linear":
            x, weight, bias = (*args, None)[:3]
            product = (x.double() @ weight.double().t()).to(x.dtype)
            return product if bias is None else product.add_(bias)
        if name == "bmm":
            return (args[0].double() @ args[1].double()).to(args[0].dtype)
        if name == "addmm_":
            residual, x, transposed = args
            return residual.add_((x.double() @ transposed.double()).to(x.dtype))
        if _is_cuda(kwargs.get("device")):
            if name in COPYING and not self._is_loading:
                raise DeviceError(f"{name} on a device waits for the device")
            del kwargs["device"]
            return device.adopt(func(*args, **kwargs))
        if name == "to" and any(map(_is_cuda, args[1:])):
            if not self._is_loading and not device.holds(args[0]):
                raise DeviceError("a copy from memory that is not page-locked waits for the device")
            rest = [each for each in args[1:] if isinstance(each, torch.dtype)]
            source = on_host(args[0])
            return device.adopt(source.to(*rest, **kwargs | {"copy": True}))
        if self._is_loading and name == "copy_" and device.holds(args[0]):
            on_host(args[0]).copy_(on_host(args[1]))
            return args[0]
        return func(*args, **kwargs)


def numbers_of_codes(weight: CodedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a weight [out, in] on a FakeDevice, rounded to `dtype`, as float64."""
    codes, middle = on_host(weight.codes), 1 << weight.bits - 1
    if weight.bits == 4:
        halves = codes.view(len(codes), -1, 16)
        codes = torch.cat((halves & 15, halves >> 4), -1).flatten(1)
    shape = weight.out_features, -1, weight.group
    if weight.is_float:
        numbers = codes.view(torch.float8_e4m3fn).float().view(shape)
    elif weight.table is not None:
        numbers = on_host(weight.table)[codes.long()].view(shape)
    else:
        zeros = middle if weight.zeros is None else on_host(weight.zeros).t()[:, :, None]
        numbers = (codes.short().view(shape) - zeros).float()
    numbers = numbers * on_host(weight.scales).float().t()[:, :, None]
    return numbers.view(len(codes), -1).to(dtype).double()


class ExpertsWithoutTriton(TritonExperts):
    """TritonExperts for tensors of a FakeDevice; products are rounded as torch's on a CPU are."""

    def _sort(self, chosen: torch.Tensor, pairs: PairBlocks, block: int) -> None:
        assert isinstance(pairs.rows, DeviceTensor)

        def run() -> None:
            written = sorted_pairs(on_host(chosen), self._first, self._num_experts, block)
            for name in PairBlocks.__slots__:
                on_host(getattr(pairs, name)).copy_(getattr(written, name))

        pairs.rows.owner.kernel(run)

    def _combine(
        self, output: torch.Tensor, weights: torch.Tensor, pairs: PairBlocks, total: torch.Tensor
    ) -> None:
        assert isinstance(total, DeviceTensor)

        def run() -> None:
            index = on_host(pairs.sorted_index).long()
            found = on_host(output)[index.clamp_min(0)] * on_host(weights).reshape(-1, 1)
            found[index < 0] = 0
            on_host(total).copy_(found.view(*weights.shape, -1).sum(1))

        total.owner.kernel(run)

    def _multiply(
        self,
        x: torch.Tensor,
        pairs: PairBlocks,
        rows: torch.Tensor,
        weight: torch.Tensor | CodedWeight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        tile: Tile,
    ) -> None:
        assert isinstance(out, DeviceTensor)

        def numbers(expert: int) -> torch.Tensor:
            if not isinstance(weight, CodedWeight):
                return on_host(weight)[expert].double()
            own = (None if each is None else on_host(each)[expert] for each in stacks(weight))
            codes, scales, zeros = own
            assert codes is not None
            assert scales is not None
            one = replace(weight, codes=codes, scales=scales, zeros=zeros)
            return numbers_of_codes(one, x.dtype)

        def run() -> None:
            blocks = (on_host(each).tolist() for each in (pairs.experts, pairs.first, pairs.end))
            for expert, first, end in zip(*blocks, strict=True):
                assert end - first <= tile.rows
                inputs = on_host(x)[on_host(rows)[first:end]].double()
                product = inputs @ numbers(expert).t()
                on_host(out)[first:end] = product.to(x.dtype).to(out.dtype)
                if bias is not None:
                    on_host(out)[first:end] += on_host(bias)[expert]

        out.owner.kernel(run)


def stacks(weight: CodedWeight) -> tuple[torch.Tensor | None, ...]:
    """Return what a stack of weights has for each of them."""
    return weight.codes, weight.scales, weight.zeros


class SlotsWithoutTriton(SlotAdapters):
    """SlotAdapters for tensors of a FakeDevice; sums are rounded once, as in plain torch."""

    def _launch(
        self,
        product: ProductSlots,
        step: StepRows,
        x: torch.Tensor,
        y: torch.Tensor,
        of_product: torch.Tensor,
    ) -> None:
        assert isinstance(y, DeviceTensor)
        memory = self._reserved
        rows_of_step = [getattr(step, name) for name in StepRows.__slots__]
        given = (*rows_of_step, memory.slots, x, of_product, product.tiles)
        assert all(isinstance(each, DeviceTensor) for each in given)

        def run() -> None:
            slots, firsts, ends = (
                on_host(each).tolist() for each in (step.slots, step.firsts, step.ends)
            )
            for slot, first, end in zip(slots, firsts, ends, strict=True):
                if first == end:
                    continue
                rows = on_host(step.rows)[first:end].long()
                scales = on_host(step.scales)[first:end, None].double()
                fields = on_host(memory.table)[slot].tolist()
                numbers = on_host(memory.numbers)[slot].double()
                before = on_host(y)[rows].double()
                after = before.clone()
                for place, weight in enumerate(product.weights):
                    at = 3 * (product.entry + place)
                    rank, down, up = fields[at : at + 3]
                    num_inputs, num_outputs = weight.num_inputs, len(weight.outputs)
                    a = numbers[down : down + rank * num_inputs].view(rank, num_inputs)
                    b = numbers[up : up + rank * num_outputs].view(rank, num_outputs)
                    part = on_host(x)[rows].double() @ a.t() @ b
                    after[:, weight.outputs.start : weight.outputs.stop] += part * scales
                count, factor = product.num_outputs, fields[product.factor_field]
                if factor:
                    gain, shift = on_host(memory.factors)[slot, factor:][: 2 * count].split(count)
                    own = on_host(of_product)[rows].double()[:, :count]
                    after[:, :count] += (own * gain + shift) * scales
                on_host(y)[rows] = after.to(y.dtype)

        y.owner.kernel(run)


class StatesWithoutTriton(CudaStates):
    """CudaStates for tensors of a FakeDevice."""

    def _begin(self, step: StateStep) -> None:
        assert isinstance(step.sources, DeviceTensor)

        def run() -> None:
            positions = on_host(self.buffer).view(torch.int32)[:, -1]
            host = {name: on_host(getattr(step, name)) for name in StateStep.__slots__}
            sources = host["sources"].long()
            again = host["computed"] - positions[sources.clamp_min(0)]
            host["again"].copy_(again.where(sources >= 0, 0))
            end = int(host["write_start"][-1])
            positions[host["write_slots"][:end].long()] = host["positions"][:end]

        step.sources.owner.kernel(run)


class _RecurrenceWithoutTriton(TritonRecurrence):
    """Computes a layer in plain torch from the arrays that the kernels read."""

    def __init__(self, shape: Any, weights: Any) -> None:
        super().__init__(shape, weights)  # type: ignore[call-arg]
        self._given = weights

    def _launch(
        self,
        inputs: Sequence[torch.Tensor],
        step: StateStep,
        states: torch.Tensor,
        max_logged: int,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(out, DeviceTensor)
        tensors = {
            name: on_host(value)
            for name in self._given.__slots__
            if isinstance(value := getattr(self._given, name), torch.Tensor)
        }
        weights = replace(self._given, **tensors)
        reference = RECURRENCES[type(self.shape)](self.shape, weights)

        def run() -> None:
            own = on_host(states)
            plan = plan_of(step)
            shape = StateShape((own.shape[1],), max_logged)
            cache: Any = SimpleNamespace(plan=plan, of_layer=lambda layer: own, shape=shape)
            num_tokens = int(plan.query_start[-1])
            rows = [on_host(each)[:num_tokens] for each in inputs]
            on_host(out).zero_()
            on_host(out)[:num_tokens] = reference.run(rows, cache, 0, ByteBuffer())

        out.owner.kernel(run)


def plan_of(step: StateStep) -> StatePlan:
    """Return a plan that is on a FakeDevice, without added sequences."""
    host = {name: on_host(getattr(step, name)).numpy() for name in StateStep.__slots__}
    num_seqs = int((np.diff(host["query_start"]) > 0).sum())
    token_start = query_start = host["query_start"][: num_seqs + 1]
    owners = host["owners"][: query_start[-1]]
    assert (owners == np.repeat(np.arange(num_seqs), np.diff(query_start))).all()
    assert (host["owners"][query_start[-1] :] == -1).all()
    if host["again"].any():
        token_start = query_start.copy()
        token_start[1:] += host["again"][:num_seqs].cumsum(dtype=np.int32)
    return StatePlan(
        query_start,
        token_start,
        host["sources"][:num_seqs],
        host["write_start"][: num_seqs + 1],
        *(host[name] for name in ("write_bases", "write_ends", "write_slots", "positions")),
    )


class DeltaRuleWithoutTriton(_RecurrenceWithoutTriton, TritonDeltaRule):
    """TritonDeltaRule for tensors of a FakeDevice."""


class Mamba2WithoutTriton(_RecurrenceWithoutTriton, TritonMamba2):
    """TritonMamba2 for tensors of a FakeDevice."""


class ShortConvWithoutTriton(_RecurrenceWithoutTriton, TritonShortConv):
    """TritonShortConv for tensors of a FakeDevice."""


RECURRENCES_WITHOUT_TRITON = {
    DeltaRuleShape: DeltaRuleWithoutTriton,
    Mamba2Shape: Mamba2WithoutTriton,
    ShortConvShape: ShortConvWithoutTriton,
}


class CodedLinearWithoutTriton(TritonCodedLinear):
    """TritonCodedLinear for tensors of a FakeDevice: numbers are rounded as the kernel does."""

    def _multiply(
        self, x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        assert isinstance(out, DeviceTensor)
        assert all(isinstance(each, DeviceTensor) for each in (x, weight.codes, weight.scales))

        def run() -> None:
            product = on_host(x).double() @ numbers_of_codes(weight, x.dtype).t()
            on_host(out).copy_(product if bias is None else product + on_host(bias).double())

        out.owner.kernel(run)


class SameThreadExecutor:
    """A ThreadPoolExecutor that works in the calling thread, since torch modes are per thread."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "SameThreadExecutor":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def _is_cuda(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == "cuda"
