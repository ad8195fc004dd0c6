"""A queue of an accelerator that runs beside the one that computes.

What is queued on it waits for nothing but what it is told to wait for; tests put one in this
place that notices what would race.
"""

from typing import Protocol

import torch

from worker.device.accelerator import Event


class CopyStream(Protocol):
    """Copies between the device's memory and page-locked memory of the host."""

    def wait_for_compute(self) -> None:
        """What follows waits for all that is queued for the current step and those before."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of bytes; nobody waits."""
        ...

    def mark(self) -> Event:
        """Stands for everything that has been queued on it so far."""
        ...


class CudaCopyStream:
    """CopyStream: a CUDA stream of the usual priority, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]

    def wait_for_compute(self) -> None:
        """As the Protocol says."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """As the Protocol says."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        """As the Protocol says."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        marked: Event = event
        return marked
