"""Memory, queue and graphs of an accelerator; the one that there is, CUDA, behind a Protocol.

Work on it is queued: a call returns before anything has run, and only an event or a result
on the host is waited for. Tests put a device in this place that runs on the CPU and refuses
what would wait or race.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A place in the queue of an accelerator."""

    def record(self) -> None:
        """Stand for everything that has been queued so far."""
        ...

    def query(self) -> bool:
        """Whether that has run; does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until that has run; at once where nothing was recorded."""
        ...


class Graph(Protocol):
    """Work that was recorded once and is queued again as one."""

    def replay(self) -> None:
        """Queue it: the same kernels on the same addresses, whatever stands there now."""
        ...


class Accelerator(Protocol):
    """Memory and queue of a device, used by one thread."""

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor [size] of zeros on the device."""
        ...

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Host memory, uint8 [num_bytes], that copies may still use after they are queued."""
        ...

    def event(self) -> Event:
        """A new event of the current queue."""
        ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host; waits for all that is queued."""
        ...

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Record what `run` queues, without running it; the graph, and where its result will be.

        `run` neither waits for the device nor reads memory of the host. Memory that it
        takes stays taken as long as any graph lives; graphs may share it, so a result
        stands only until another graph is replayed.
        """
        ...

    def memory_taken(self) -> int:
        """Bytes that this process holds on the device."""
        ...

    def num_multiprocessors(self) -> int:
        """Parts of the device that each run blocks of a kernel."""
        ...


class Cuda:
    """Accelerator: one CUDA device and its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """As the Protocol says."""
        return torch.zeros(size, dtype=dtype, device=self._device)

    def staging(self, num_bytes: int) -> torch.Tensor:
        """As the Protocol says; page-locked."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        """As the Protocol says."""
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the Protocol says."""
        return tensor.cpu()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """As the Protocol says; all graphs share one pool of memory.

        What other threads do meanwhile is no part of it: NCCL has one that looks at events.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph, result

    def memory_taken(self) -> int:
        """As the Protocol says."""
        return torch.cuda.memory_reserved(self._device)

    def num_multiprocessors(self) -> int:
        """As the Protocol says."""
        return torch.cuda.get_device_properties(self._device).multi_processor_count
