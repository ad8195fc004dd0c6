"""A device with memory and a queue of its own, on the CPU: what a GPU would do wrong late, at once.

Its tensors are of a class of their own, so that memory of host and device cannot be mixed
and whatever would wait for the device is refused. Copies and schedules count as queued
until an event recorded after them is waited for; host memory that a queued copy reads must
not change until then.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tests.fakes.fake_graph import FakeGraph, Recorder
from worker.attention.base import AttentionBackend, AttentionInputs
from worker.kv_cache import KVCache
from worker.layers.rotary import Rotation

NUM_MULTIPROCESSORS = 4


class DeviceError(Exception):
    """Something that fails, waits or races on a real device."""


WAITING = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "allclose",
    "new_tensor",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "__contains__",
)
"""Functions of tensors that need a result of the device on the host."""


class DeviceTensor(torch.Tensor):
    """A tensor in the memory of `owner`, which each device sets in a class of its own."""

    owner: "FakeDevice"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in WAITING:
            raise DeviceError(f"{name} waits for the device")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise DeviceError("repeat_interleave without output_size waits for the device")
        tensors = list(_tensors((args, kwargs)))
        if name in ("index_copy", "index_copy_") and _is_float8(args[0]):
            raise DeviceError(f"{name} has no kernel for {args[0].dtype}")
        if name == "__getitem__" and any(each.dtype == torch.bool for each in tensors[1:]):
            raise DeviceError("indexing with a mask waits for the device")
        host = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim()]
        if name == "copy_" and isinstance(args[0], cls) and host:
            cls.owner.queue_copy(args[1], kwargs.get("non_blocking", False))
        elif name == "copy_" and host:
            return cls.owner.queue_download(*args, kwargs.get("non_blocking", False))
        elif host:
            raise DeviceError(f"{name} of tensors on host and device")
        return super().__torch_function__(func, types, args, kwargs)


@dataclass
class _Copy:
    """A queued copy: from where, and what is to arrive."""

    place: int
    source: torch.Tensor
    content: torch.Tensor


@dataclass
class _Download:
    """A queued copy to the host: where to, and what is to arrive."""

    place: int
    target: torch.Tensor
    content: torch.Tensor


class FakeEvent:
    """An event of a FakeDevice."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self._place = 0
        self._was_asked = False

    def record(self) -> None:
        self._place = self._device.queued

    def query(self) -> bool:
        """A device comes to it by itself: not at the first look, but at the second."""
        self._device.refuse_in_capture("a look at an event")
        if self._was_asked:
            self._device.complete(self._place)
        self._was_asked = True
        return self._device.completed >= self._place

    def synchronize(self) -> None:
        self._device.complete(self._place)


class FakeDevice:
    """Accelerator whose queue runs only as far as somebody waits for it.

    queued, completed: how much of it there is.
    """

    def __init__(self) -> None:
        self.queued = 0
        self.completed = 0
        self.memory = type("DeviceTensor", (DeviceTensor,), {"owner": self})
        self._staging: set[int] = set()
        self._owned: set[int] = set()
        self._copies: list[_Copy] = []
        self._downloads: list[_Download] = []
        self._recorder: Recorder | None = None
        self.num_replays = 0

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self.refuse_in_capture("memory that is to last")
        return self.adopt(torch.zeros(size, dtype=dtype))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.refuse_in_capture("page-locked memory")
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self._staging.add(memory.untyped_storage().data_ptr())
        return memory

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.complete(self.enqueue())
        return on_host(tensor).clone()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[FakeGraph, torch.Tensor]:
        self.refuse_in_capture("another capture")
        self._recorder = Recorder()
        try:
            with self._recorder:
                result = run()
        finally:
            recorder, self._recorder = self._recorder, None
        # Recording computes nothing on a real device.
        on_host(result).fill_(float("nan"))
        return FakeGraph(recorder.calls, self._replayed), result

    def memory_taken(self) -> int:
        return 0

    def num_multiprocessors(self) -> int:
        return NUM_MULTIPROCESSORS

    def kernel(self, run: Callable[[], None]) -> None:
        """Somebody plays a kernel: what it does to tensors is not what a host may do."""
        with self._recorder.as_one(run) if self._recorder else nullcontext():
            run()
        self.enqueue()

    def _replayed(self) -> None:
        self.refuse_in_capture("a replay")
        self.num_replays += 1
        self.enqueue()

    def refuse_in_capture(self, what: str) -> None:
        """Raise where a graph is being recorded."""
        if self._recorder is not None:
            raise DeviceError(f"{what} inside a capture")

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, as the device's."""
        return tensor.as_subclass(self.memory)

    def holds(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, self.memory)

    def own(self, place: int) -> bool:
        """Let somebody have the memory at an address; False where it is another's already."""
        free = place not in self._owned
        self._owned.add(place)
        return free

    def disown(self, place: int) -> None:
        """The memory is nobody's any more, and may be given again."""
        self._owned.discard(place)

    def enqueue(self) -> int:
        """Something more is queued; returns its place."""
        self.queued += 1
        return self.queued

    def queue_copy(self, source: torch.Tensor, non_blocking: bool) -> None:
        """A copy from host memory."""
        self.refuse_in_capture("a copy from the host")
        if not non_blocking or source.untyped_storage().data_ptr() not in self._staging:
            raise DeviceError("a copy from memory that is not page-locked waits for the device")
        for each in self._copies:
            if each.source.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                raise DeviceError("memory is filled again that a queued copy has not read")
        self._copies.append(_Copy(self.enqueue(), source, source.clone()))

    def queue_download(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> torch.Tensor:
        """A copy to host memory, which holds rubbish until it has run."""
        self.refuse_in_capture("a copy to the host")
        if not non_blocking or target.untyped_storage().data_ptr() not in self._staging:
            raise DeviceError("a copy to memory that is not page-locked waits for the device")
        content = on_host(source).clone()
        target.view(torch.uint8).fill_(0xA5)
        self._downloads.append(_Download(self.enqueue(), target, content))
        return target

    def complete(self, place: int) -> None:
        """The queue has run up to `place`."""
        self.refuse_in_capture("a wait")
        self.completed = max(self.completed, place)
        ran = [each for each in self._copies if each.place <= self.completed]
        self._copies = [each for each in self._copies if each.place > self.completed]
        with torch.inference_mode():
            for each in self._downloads:
                if each.place <= self.completed:
                    each.target.copy_(each.content)
        self._downloads = [each for each in self._downloads if each.place > self.completed]
        if not all(torch.equal(each.source, each.content) for each in ran):
            raise DeviceError("memory was written while a queued copy had not read it")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any device as torch sees it, for whoever plays the device."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def cache_on(device: FakeDevice, kv_cache: KVCache) -> KVCache:
    """The same pages, in the device's memory."""
    twin = copy.copy(kv_cache)
    twin.buffer = device.adopt(kv_cache.buffer)
    return twin


class AcrossTheBoundary:
    """AttentionBackend for a model on the host, over one whose tensors are on a device."""

    def __init__(self, device: FakeDevice, backend: AttentionBackend) -> None:
        self._device = device
        self._backend = backend

    def plan(self, inputs: list[AttentionInputs]) -> None:
        self._backend.plan(inputs)

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor:
        adopt = self._device.adopt
        # A backend may turn queries and keys where they are.
        query, key = query.clone(), key.clone()
        result = self._backend.run(layer, adopt(query), adopt(key), adopt(value), adopt(rotation))
        assert self._device.holds(result)
        return on_host(result)


def _is_float8(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors inside nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
