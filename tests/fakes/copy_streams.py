"""Streams that copy blocks on a fake device."""

import torch

from tests.fakes.fake_device import FakeDevice, FakeEvent


class FakeStream:
    """A CopyStream over a FakeDevice; fails if a copy does not wait for the steps before it."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._follows = -1
        self.computed = 0

    def compute(self) -> None:
        """Queue a step."""
        self.computed += 1

    def wait_for_compute(self) -> None:
        self._follows = self.computed

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._follows == self.computed, "a copy races with the step before it"
        target.copy_(source, non_blocking=True)

    def record_event(self) -> FakeEvent:
        event = self._device.event()
        event.record()
        return event


class NoWatcher:
    """An event watcher that does nothing: the test polls."""

    def __init__(self) -> None:
        self.closed = False

    def watch(self, event: object) -> None: ...

    def close(self) -> None:
        self.closed = True


class CopyingThread(FakeStream):
    """A CopyStream for a thread that itself waits for the steps before it queues a copy."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
