"""Memory, streams and graphs of a CUDA device.

Work on the device is queued: a call returns before anything has run, and the host waits only for
an event or for a result. Tests replace both classes by a device on the CPU that refuses calls
that would wait or race.
"""

from collections.abc import Callable

import torch


class Accelerator:
    """One CUDA device and its current stream, used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked host memory, uint8 [num_bytes], for copies that are only queued."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        """Return a new event, to be recorded in the current stream."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def external_event(self) -> torch.cuda.Event:
        """Return an event that a graph records at each replay, for others to wait for."""
        event: torch.cuda.Event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        return event

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host; waits until all queued work has run."""
        return tensor.cpu()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Record the kernels that `run` launches, without running them; return graph and result.

        `run` neither waits for the device nor reads host memory. All graphs share one memory pool,
        which stays allocated as long as any of them lives, so a result is valid only until
        another graph is replayed.
        """
        graph = torch.cuda.CUDAGraph()
        # NCCL has a thread that queries events meanwhile; that must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph, result

    def memory_taken(self) -> int:
        """Return the bytes that this process holds on the device."""
        return torch.cuda.memory_reserved(self._device)

    def num_multiprocessors(self) -> int:
        return torch.cuda.get_device_properties(self._device).multi_processor_count


class CopyStream:
    """A CUDA stream for copies between device and page-locked memory, beside the compute stream.

    Copies wait for nothing except `wait_for_compute`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]

    def wait_for_compute(self) -> None:
        """Make later copies wait for all steps that are queued on the compute stream now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of bytes; returns at once."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record_event(self) -> torch.cuda.Event:
        """Return an event that is reached when all copies queued so far have run."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event
