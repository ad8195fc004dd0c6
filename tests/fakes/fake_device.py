"""A fake accelerator on the CPU with separate memory and a queue, which reports misuse immediately.

Its tensors have a separate class, so mixing host and device memory is an error, and so is any
operation that would wait for the device. Copies and launches stay queued until an event recorded
after them is synchronized; host memory that a queued copy reads must not change until then.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tests.fakes.fake_graph import FakeGraph, Recorder
from tests.fakes.nested import nested_tensors
from worker.attention.backend import AttentionBackend, AttentionInputs, Rotation
from worker.attention.kv_cache import KVCache

NUM_MULTIPROCESSORS = 4


class DeviceError(Exception):
    """An operation that fails, synchronizes or races on a real device."""


SYNCHRONIZING = (
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
"""Tensor functions that need a device result on the host."""


class DeviceTensor(torch.Tensor):
    """A tensor in the memory of `owner`; every device has a subclass of its own."""

    owner: "FakeDevice"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in SYNCHRONIZING:
            raise DeviceError(f"{name} waits for the device")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise DeviceError("repeat_interleave without output_size waits for the device")
        tensors = list(nested_tensors((args, kwargs)))
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
    """A queued copy to the device: its source, and the content at that time."""

    position: int
    source: torch.Tensor
    content: torch.Tensor


@dataclass
class _Download:
    """A queued copy to the host: its target, and the content that will arrive."""

    position: int
    target: torch.Tensor
    content: torch.Tensor


class FakeEvent:
    """An event of a FakeDevice."""

    def __init__(self, device: "FakeDevice", is_external: bool = False) -> None:
        self._device = device
        self._position = 0
        self._was_queried = False
        self._is_external = is_external

    def record(self) -> None:
        if self._is_external and self._device.records_in_graph(self._mark):
            return
        self._device.refuse_in_capture("an event that nothing outside can wait for")
        self._position = self._device.queued

    def _mark(self) -> None:
        self._position = self._device.enqueue()

    def query(self) -> bool:
        """Return whether the event has happened; it has at the second query, without a wait."""
        self._device.refuse_in_capture("a query of an event")
        if self._was_queried:
            self._device.complete(self._position)
        self._was_queried = True
        return self._device.completed >= self._position

    def synchronize(self) -> None:
        self._device.complete(self._position)


class FakeDevice:
    """Accelerator whose queue runs only as far as the host waits for it.

    queued, completed: number of operations.
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
        self.refuse_in_capture("an allocation")
        return self.adopt(torch.zeros(size, dtype=dtype))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.refuse_in_capture("page-locked memory")
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self._staging.add(memory.untyped_storage().data_ptr())
        return memory

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def external_event(self) -> FakeEvent:
        return FakeEvent(self, is_external=True)

    def records_in_graph(self, call: Callable[[], None]) -> bool:
        """Add a call to the graph that is being captured; False if there is none."""
        if self._recorder is None:
            return False
        self._recorder.calls.append(call)
        return True

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
        """Run a function as a kernel of the device, which may access device memory."""
        with self._recorder.as_one(run) if self._recorder else nullcontext():
            run()
        self.enqueue()

    def _replayed(self) -> None:
        self.refuse_in_capture("a replay")
        self.num_replays += 1
        self.enqueue()

    def refuse_in_capture(self, what: str) -> None:
        """Raise DeviceError while a graph is captured."""
        if self._recorder is not None:
            raise DeviceError(f"{what} inside a capture")

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as one in device memory, without a copy."""
        return tensor.as_subclass(self.memory)

    def holds(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, self.memory)

    def claim(self, position: int) -> bool:
        """Claim the memory at an address; return False if it is claimed already."""
        free = position not in self._owned
        self._owned.add(position)
        return free

    def release(self, position: int) -> None:
        """Release memory that was claimed."""
        self._owned.discard(position)

    def enqueue(self) -> int:
        """Queue one more operation; return its position."""
        self.queued += 1
        return self.queued

    def queue_copy(self, source: torch.Tensor, non_blocking: bool) -> None:
        """Queue a copy from host memory."""
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
        """Queue a copy to host memory, which holds invalid data until the copy runs."""
        self.refuse_in_capture("a copy to the host")
        if not non_blocking or target.untyped_storage().data_ptr() not in self._staging:
            raise DeviceError("a copy to memory that is not page-locked waits for the device")
        content = on_host(source).clone()
        target.view(torch.uint8).fill_(0xA5)
        self._downloads.append(_Download(self.enqueue(), target, content))
        return target

    def complete(self, position: int) -> None:
        """Run the queue up to `position`."""
        self.refuse_in_capture("a wait")
        self.completed = max(self.completed, position)
        ran = [each for each in self._copies if each.position <= self.completed]
        self._copies = [each for each in self._copies if each.position > self.completed]
        with torch.inference_mode():
            for each in self._downloads:
                if each.position <= self.completed:
                    each.target.copy_(each.content)
        self._downloads = [each for each in self._downloads if each.position > self.completed]
        if not all(torch.equal(each.source, each.content) for each in ran):
            raise DeviceError("memory was written while a queued copy had not read it")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain torch view of a tensor, for code that acts as the device."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def cache_on(device: FakeDevice, kv_cache: KVCache) -> KVCache:
    """Return the KV cache with its buffer in device memory."""
    twin = copy.copy(kv_cache)
    twin.buffer = device.adopt(kv_cache.buffer)
    return twin


class DeviceAttentionForHost:
    """AttentionBackend for a model on the host that delegates to one on a device."""

    def __init__(self, device: FakeDevice, backend: AttentionBackend) -> None:
        self._device = device
        self._backend = backend
        self.query_split = backend.query_split

    def plan(self, inputs: list[AttentionInputs]) -> None:
        self._backend.plan(inputs)

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        adopt = self._device.adopt
        # A backend may rotate queries and keys in place.
        query, key = query.clone(), key.clone()
        parts = (part if part is None else adopt(part) for part in (query, key, value, rotation))
        result = self._backend.run(layer, *parts, None if sinks is None else adopt(sinks))
        assert self._device.holds(result)
        return on_host(result)


def _is_float8(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
