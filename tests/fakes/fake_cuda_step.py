"""Whole steps of all model families on "cuda" without a GPU, with only shapes, dtypes and devices.

Tensors belong to torch's FakeTensorMode, which tracks their device and computes nothing. HotPath
watches every operator: it refuses calls that mix host and device tensors or wait for the device,
and records one call for each operator and its dtypes. FlashInfer and Triton are replaced by calls
that check only devices; fake_flashinfer.py checks their arguments.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from proto.codec import changed
from proto.messages.logit_edits import LogitEdits
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from proto.settings.config import DeviceConfig
from tests.fakes.devices import GPU
from tests.fakes.gpu_families import GPU_CONFIGS, VOCAB_SIZE
from tests.fakes.nested import nested_tensors
from tests.fakes.prepared_models import build_decoder, shapes_of
from tests.fakes.triton import KERNELS
from worker.attention.kv_cache import KVCache
from worker.batch.input_batch import InputBatch
from worker.batch.step_inputs import TokenAdapters
from worker.cuda import async_runner as ahead
from worker.cuda import device as cuda_device
from worker.cuda import runner_builder
from worker.cuda.attention.kv_store import TritonStore
from worker.cuda.layers.adapter_slots import SlotAdapter, SlotAdapters
from worker.cuda.runner_builder import DeviceKernels, Gpu
from worker.cuda.sampling import draft_draw
from worker.cuda.sampling.device_kernels import TritonDraw, TritonEdits
from worker.cuda.states import CudaStates
from worker.cuda.transfers import Download, Downloader
from worker.layers.adapters import AdapterRows, AdapterTargets
from worker.loader.adapters.build import AdapterLoader, adapted_weights
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config
from worker.models.spec import ModelSpec
from worker.plan.draft_settings import draft_cache
from worker.plan.memory_plan import layer_cache
from worker.reference.sampling import TorchBackend
from worker.sampling.sampler import Sampler
from worker.speculation.drafter import DraftedModel
from worker.step.adapter_store import AdapterStore
from worker.step.runner_parts import DrafterParts, RunnerParts

CUDA = torch.device("cuda", 0)
BLOCK = 4
MAX_LOGGED = 4
"""Tokens of a draft that states have a log of."""


class HotPathError(RuntimeError):
    """A call that fails on a GPU, or waits for it."""


def _translate(error: RuntimeError, operator: Any) -> None:
    """Raise HotPathError for an error of fake tensors that is one on a GPU."""
    if isinstance(error, FakeTensorDeviceMismatchError):
        raise HotPathError(f"{operator} of tensors on host and device") from error
    waits = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    if waits or "not linked with support for cuda" in str(error):
        raise HotPathError(f"{operator} waits for the device") from error


class HotPath(TorchDispatchMode):
    """Watches operators, innermost of all modes.

    calls: arguments of the first call of each operator with its dtypes, as JSON has them; of one
        with elements, if there is any.
    launches: what a GPU gets from the host, counted: operators, kernels, copies, plans, replays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
        self.launches = Counter[str]()
        self._empty: set[tuple[str, tuple[str, ...]]] = set()
        self.is_capturing = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query of a tensor's device
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _as_fake, (args, kwargs))
        try:
            # The fake operator queries the device; the size is a host number.
            is_filled = func is torch.ops.aten.arange.out
            result = kwargs["out"] if is_filled else func(*args, **kwargs)
        except RuntimeError as error:
            _translate(error, func)
            raise
        given = list(nested_tensors((args, kwargs)))
        self._check(func, given, list(nested_tensors(result)), args, kwargs)
        if not func.is_view and any(_is_cuda(each) for each in (*given, *nested_tensors(result))):
            if all(each.numel() for each in given) and "empty" not in str(func):
                self.note_launch(_launch_name(func, args))
            dtypes = tuple(_name(each.dtype) for each in given or nested_tensors(result))
            # Without elements no kernel is launched.
            key, is_empty = (str(func), dtypes), any(not each.numel() for each in given)
            if key not in self.calls or (key in self._empty and not is_empty):
                self.calls[key] = {"args": _described(args), "kwargs": _described(kwargs)}
                (self._empty.add if is_empty else self._empty.discard)(key)
        return result

    def note_launch(self, name: str) -> None:
        """Count a launch, unless it is captured."""
        if not self.is_capturing:
            self.launches[name] += 1

    def _check(
        self,
        func: Any,
        given: list[torch.Tensor],
        results: list[torch.Tensor],
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        # Host scalars are passed as kernel arguments.
        whole = [each for each in given if each.dim()]
        here, there = (
            any(_is_cuda(each) == on_device for each in whole) for on_device in (False, True)
        )
        if func is torch.ops.aten.copy_.default and here and there:
            if self.is_capturing:
                raise HotPathError("a copy between host and device inside a capture")
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                raise HotPathError("a copy that waits for the device")
            return
        if here and there:
            raise HotPathError(f"{func} of tensors on host and device")
        arrives = any(map(_is_cuda, results))
        if given and arrives != any(map(_is_cuda, given)):
            raise HotPathError(f"{func} moves a tensor between host and device, and waits")


def _launch_name(func: Any, args: Any) -> str:
    if func is torch.ops.aten.copy_.default and _is_cuda(args[0]) != _is_cuda(args[1]):
        return "upload" if _is_cuda(args[0]) else "download"
    return str(func).removeprefix("aten.")


def _contiguous(tensor: torch.Tensor) -> Any:
    if tensor.is_contiguous():
        return tensor
    return torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)


_OPERATORS: dict[Any, Any] = {
    torch.Tensor.copy_: torch.ops.aten.copy_,
    torch.Tensor.__invert__: torch.ops.aten.bitwise_not,
    torch.Tensor.contiguous: _contiguous,
}


class WithoutDeviceGuards(TorchFunctionMode):
    """Calls operators instead of functions that query a device, which CPU-only torch lacks."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and _is_cuda(args[0]):
            tensor, index, *value = args
            part = _indexed(tensor, index if isinstance(index, tuple) else (index,))
            return torch.ops.aten.copy_(part, *value) if value else part
        if func is torch.arange and "out" in kwargs:
            return torch.ops.aten.arange.out(*args, **kwargs)
        operator = _OPERATORS.get(func, func)
        try:
            return operator(*args, **kwargs)
        except RuntimeError as error:
            _translate(error, operator)
            raise


def _indexed(tensor: torch.Tensor, indices: tuple[Any, ...]) -> torch.Tensor:
    dim = 0
    for number, index in enumerate(indices):
        match index:
            case slice():
                begin, end = index.start or 0, index.stop
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, begin, end, index.step or 1)
            case int():
                tensor, dim = tensor.select(dim, index), dim - 1
            case None:
                tensor = tensor.unsqueeze(dim)
            case _ if index is Ellipsis:
                rest = indices[number + 1 :]
                dim = tensor.dim() - sum(each is not None for each in rest) - 1
            case _:
                assert number == len(indices) - 1, "one tensor, and last"
                return torch.ops.aten.index.Tensor(tensor, [None] * dim + [index])
        dim += 1
    return tensor


class FakeAccelerator:
    """An accelerator on which nothing runs."""

    def __init__(self, watch: HotPath) -> None:
        self._watch = watch

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=CUDA)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.zeros(num_bytes, dtype=torch.uint8)

    def event(self) -> "FakeAccelerator":
        return self

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def replay(self) -> None:
        self._watch.note_launch("graph")

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        raise HotPathError("a result is waited for")

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple["FakeAccelerator", torch.Tensor]:
        self._watch.is_capturing = True
        try:
            return self, run()
        finally:
            self._watch.is_capturing = False

    def memory_taken(self) -> int:
        return 0

    def num_multiprocessors(self) -> int:
        return 132


class Launches:
    """A Triton kernel, or a function or wrapper of FlashInfer, whose tensors must be on the device.

    name: in the launches of the watch. on_host: numbers of the arguments that are read on the host.
    watch: the active one.
    """

    watch: HotPath | None = None

    def __init__(self, name: str = "", on_host: tuple[int, ...] = ()) -> None:
        self._name = name
        self._on_host = on_host

    def __getitem__(self, grid: Any) -> "Launches":
        return self

    def __call__(self, *args: Any, **settings: Any) -> None:
        if self.watch is not None:
            self.watch.note_launch(self._name)
        for number, each in enumerate(args):
            expected = number not in self._on_host
            if any(_is_cuda(tensor) != expected for tensor in nested_tensors(each)):
                raise HotPathError(f"argument {number} of a kernel is on the wrong side")


class FakeWrapper:
    """Either of FlashInfer's wrappers."""

    def __init__(self, name: str, on_host: tuple[int, ...]) -> None:
        self.plan = Launches(f"{name}.plan", on_host)
        self.run = Launches(f"{name}.run")
        self.reset_workspace_buffer = Launches(f"{name}.reset_workspace_buffer")


class FakeLibrary:
    """The module `flashinfer`."""

    rmsnorm = Launches("rmsnorm")
    silu_and_mul = Launches("silu_and_mul")
    gelu_tanh_and_mul = Launches("gelu_tanh_and_mul")
    apply_rope_with_cos_sin_cache_inplace = Launches("apply_rope_with_cos_sin_cache_inplace")
    merge_state_in_place = Launches("merge_state_in_place")
    cutlass_fused_moe = Launches("cutlass_fused_moe")

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **settings: Any) -> FakeWrapper:
        return FakeWrapper("prefill", on_host=(0, 1, 3))

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **settings: Any) -> FakeWrapper:
        return FakeWrapper("decode", on_host=(0, 2))

    def BatchMLAPagedAttentionWrapper(self, *args: Any, **settings: Any) -> FakeWrapper:
        return FakeWrapper("latents", on_host=(0, 1, 3))

    def fast_decode_plan(self, wrapper: Any, *args: Any, **settings: Any) -> None:
        Launches("decode.plan", on_host=(2,))(*args)


class ZeroDownloader(Downloader):
    """Queued downloads that return zeros."""

    def start_download(self, tensors: Any) -> Download:
        download = super().start_download(tensors)
        found = [np.zeros(each.numel(), str(each.dtype).removeprefix("torch.")) for each in tensors]
        download.arrays = lambda: found  # type: ignore[method-assign, assignment, return-value]
        return download


def all_tokens_allowed(step: SchedulerOutput) -> GrammarOutput:
    """Return grammar masks that allow every token."""
    count = len(step.constrained_seq_ids)
    masks = b"\xff" * (VOCAB_SIZE // 8 * count)
    return GrammarOutput(1, step.step, step.constrained_seq_ids, masks)


LAUNCHED = {
    "adapters": ("reduce_block", "expand_block"),
    "recurrence": (
        *("begin_sequence", "convolve", "scan_mamba2", "scan_delta_rule"),
        *("gate_and_norm", "keep_inputs"),
    ),
    "rows": ("store_head", "norm_row", "gate_row"),
    "products": ("multiply_block", "sort_pairs", "combine"),
    "sampling": (
        *("add_listed", "edit_chunk", "draw_chunk"),
        *("range_chunk", "bins_chunk", "collect_chunk", "search_row"),
    ),
}
"""The kernels of worker/cuda/kernels that steps launch."""


@contextmanager
def watched(is_hopper: bool = False) -> Iterator[HotPath]:
    """Activate the torch modes and the fakes of kernels.

    is_hopper: mixtures run on FlashInfer.
    """
    watch, library = HotPath(), FakeLibrary()
    with ExitStack() as stack:
        kernels = {
            f"{KERNELS}.{file}": SimpleNamespace(
                **{name: Launches(f"{file}.{name}") for name in names}
            )
            for file, names in LAUNCHED.items()
        }
        stack.enter_context(patch.dict(sys.modules, kernels))
        for name, value in (
            ("is_hopper", lambda device: is_hopper),
            ("has_prebuilt_experts", lambda: is_hopper),
            ("usable_flashinfer", lambda: library),
        ):
            stack.enter_context(patch.object(cuda_device, name, value))
        for module in (ahead, draft_draw):
            stack.enter_context(patch.object(module, "Downloader", ZeroDownloader))
        stack.enter_context(patch.object(Launches, "watch", watch))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(WithoutDeviceGuards())
        yield watch


class FakeCudaRunner(NamedTuple):
    """A runner of a model without numbers, and what it was built of."""

    runner: ahead.AsyncModelRunner
    gpu: Gpu
    cache: KVCache
    parts: RunnerParts


def build_runner(
    watch: HotPath,
    family: str,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    *,
    num_rows: int = 4,
    has_draft_model: bool = False,
    has_adapters: bool = False,
    **settings: Any,
) -> FakeCudaRunner:
    """Load a model and capture graphs.

    has_draft_model: the model drafts for itself. has_adapters: 1, 2 and 3 are loaded, two of which
    fit in a step. settings: of DeviceConfig.
    """
    spec = spec_from_config(GPU_CONFIGS[family])
    adapters = FakeAdapters(watch, spec, dtype) if has_adapters else None
    decoder = make_decoder(spec, dtype, adapters and adapters.targets)
    layout, geometry = layer_cache(spec, kv_dtype or dtype, MAX_LOGGED)
    states = None
    with watch:
        if adapters is not None:
            adapters.load(1, 2, 3)
        cache = KVCache(geometry, layout, 40, BLOCK, GPU.zeros)
        if layout.states is not None:
            accelerator: Any = FakeAccelerator(watch)
            states = CudaStates(accelerator, layout.states, 40, BLOCK, GPU.zeros)
    rows = InputBatch(
        num_rows,
        spec.max_position,
        BLOCK,
        layout.num_groups,
        has_states=states is not None,
    )
    kernels = DeviceKernels(FakeLibrary, TritonStore(), TritonDraw(), TritonEdits())  # type: ignore[arg-type]
    gpu, of_draft = (
        Gpu(FakeAccelerator(watch), kernels, Sampler(TorchBackend())) for _ in range(2)
    )
    config, drafter = DeviceConfig(**settings), None
    with watch:
        if has_draft_model:
            of_tokens, heads = draft_cache(spec, dtype)
            drafted = DraftedModel(rows, 0, spec.vocab_size, 16, spec.max_position)
            drafter = runner_builder.build_drafter(
                of_draft,
                DrafterParts(
                    config=config,
                    model=decoder,
                    dtype=dtype,
                    kv_cache=KVCache(heads, of_tokens, 40, BLOCK, GPU.zeros),
                    target=drafted,
                ),
            )
        parts = RunnerParts(
            config=config,
            model=decoder,
            dtype=dtype,
            kv_cache=cache,
            batch=rows,
            states=states,
            drafter=drafter,
            adapters=adapters,
        )
        runner = runner_builder.build_runner(gpu, parts)
    assert isinstance(runner, ahead.AsyncModelRunner)
    return FakeCudaRunner(runner, gpu, cache, parts)


def run_steps(
    watch: HotPath,
    family: str,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    num_steps: int = 4,
    *,
    has_draft_model: bool = False,
    **settings: Any,
) -> None:
    """Load a model, capture graphs, run prompts, a mixed step with block copies, and decodes.

    has_draft_model: the model drafts for itself, two tokens for each sequence that decodes.
    """
    runner, gpu, cache, parts = build_runner(
        watch, family, dtype, kv_dtype, has_draft_model=has_draft_model, **settings
    )
    num_drafts = 0
    with watch:
        for step in islice(steps(cache.layout.num_groups), num_steps):
            if has_draft_model:
                decoding = step.cached_requests.seq_ids
                step = changed(
                    step, lookahead_seq_ids=decoding, num_lookahead_tokens=[2] * len(decoding)
                )
            pending = runner.launch(step, all_tokens_allowed)
            if has_draft_model:
                output = pending.result()
                assert len(output.draft_pass_rows) >= 2 * (len(output.draft_seq_ids) > 0)
                num_drafts += len(output.draft_seq_ids)
        runner_builder.run_largest_step(gpu, parts, 8, 2)
    assert (num_drafts > 0) == has_draft_model


class FakeAdapters(AdapterStore):
    """A store of adapters of rank 16 of all products, without numbers.

    watch: of the accelerator. numbers: those of the adapters.
    """

    def __init__(self, watch: HotPath, spec: ModelSpec, dtype: torch.dtype) -> None:
        accelerator: Any = FakeAccelerator(watch)
        self.slots = SlotAdapters(lambda: accelerator)
        self.targets = AdapterTargets(self.slots)
        super().__init__(Mock(spec=AdapterLoader), self.slots)
        self._reserve = lambda: self.slots.reserve(
            adapted_weights(self.targets, spec.weights(), {}, ()), 2, 16, dtype
        )
        self._pinned = accelerator.pinned

    def load(self, *numbers: int) -> None:
        """Hold adapters with these numbers; called when the products are known."""
        self._reserve()
        for number in numbers:
            content = self._pinned(self.slots.num_bytes // 2)
            self._adapters[number] = SlotAdapter(products={}, content=content, has_factors=False)

    def _rows_of(self, adapters: TokenAdapters) -> tuple[AdapterRows, ...]:
        with unset_fake_temporarily():  # the host reads them
            return super()._rows_of(adapters)


def make_decoder(
    spec: ModelSpec, dtype: torch.dtype, adapters: AdapterTargets | None = None
) -> Decoder:
    """Build the model as the loader does, with weights that have only shapes."""
    shapes = shapes_of(spec)

    def make(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=dtype, device=CUDA)

    return build_decoder(spec, make, dtype, GPU, adapters)


SAMPLING_FIELDS: tuple[dict[str, Any], ...] = (
    {
        "temperature": 0.8,
        "top_k": 5,
        "edits": LogitEdits(
            frequency_penalty=0.5, bias_token_ids=(1,), bias_values=(2.0,), bad_words=((4, 5),)
        ),
    },
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "logprob_token_ids": (7, 8)},
    {"temperature": 0.0},
)
"""Sampling fields of the requests, one each."""


def steps(num_groups: int) -> Iterator[SchedulerOutput]:
    """Yield steps: two prompts; two more, one constrained; only decodes; the end of one request."""
    counts: dict[int, int] = {}

    def blocks(seq_id: int) -> list[list[int]]:
        return [[1 + 8 * (seq_id - 1) + page for page in range(8)] for _ in range(num_groups)]

    def step(number: int, new: dict[int, int], **fields: Any) -> SchedulerOutput:
        old = list(counts)
        cached = CachedRequestData(
            old, [counts[each] for each in old], [1] * len(old), [None] * len(old), [], []
        )
        for seq_id in old:
            counts[seq_id] += 1
        counts.update(new)
        fresh = [
            NewRequestData(
                seq_id=seq_id,
                prompt_token_ids=list(range(length)),
                output_token_ids=[],
                sampling_params=SamplingParams(max_tokens=9, **SAMPLING_FIELDS[seq_id - 1]),
                seed=seq_id,
                choice=0,
                block_ids=blocks(seq_id),
                num_computed_tokens=0,
                num_scheduled_tokens=length,
            )
            for seq_id, length in new.items()
        ]
        values: dict[str, Any] = {"finished_seq_ids": [], "preempted_seq_ids": []} | fields
        return SchedulerOutput(
            epoch=1,
            step=number,
            new_requests=fresh,
            cached_requests=cached,
            total_num_scheduled_tokens=len(old) + sum(new.values()),
            **values,
        )

    yield step(1, {1: 5, 2: 7})
    yield step(2, {3: 9, 4: 2}, block_copies=[1, 33, 9, 34], constrained_seq_ids=[4])
    yield step(3, {})
    counts.pop(4)
    yield step(4, {}, finished_seq_ids=[4])


def seen_operators() -> list[dict[str, Any]]:
    """Return one call of each operator and its dtypes in the steps of all families, in order."""
    with watched() as watch:
        for family in GPU_CONFIGS:
            run_steps(watch, family)
        short: dict[str, Any] = {"num_steps": 2, "enforce_eager": True}
        run_steps(watch, "llama", torch.float16, **short)
        run_steps(watch, "llama", kv_dtype=torch.float8_e4m3fn, **short)
        run_steps(watch, "llama", cascade_attention_from=1, **short)
        run_steps(watch, "llama", has_draft_model=True)
    found = [
        {"operator": operator, "dtypes": list(dtypes), **call}
        for (operator, dtypes), call in sorted(watch.calls.items())
    ]
    plain: list[dict[str, Any]] = json.loads(json.dumps(found))
    return plain


def _described(value: Any) -> Any:
    """Return arguments as JSON, from which tests/gpu/operators.py recreates them."""
    match value:
        case torch.Tensor():
            return {
                "tensor": list(value.shape),
                "dtype": _name(value.dtype),
                "device": value.device.type,
            }
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": _name(value)}
        case torch.device():
            return {"on": value.type}
        case tuple() | list():
            return [_described(each) for each in value]
        case dict():
            return {name: _described(each) for name, each in value.items()}
    return value


def _as_fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor for page-locked memory, which is real and filled by NumPy."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _is_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")
