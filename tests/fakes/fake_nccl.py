"""A RankGroup between FakeDevices of one process, with one thread for each rank.

An exchange is a kernel of the device: a capture records it, and every replay repeats it. A rank
with another shape, or a rank that does not take part, is an error.
"""

import threading

import torch

from tests.fakes.fake_device import DeviceError, FakeDevice, on_host

LIMIT_SECONDS = 60.0


class FakeRanks:
    """The state that the ranks share. meetings: epoch and purpose of every join, by rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meetings: list[list[tuple[int, str]]] = [[] for _ in range(size)]
        self.num_exchanges = [0] * size
        self._here: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size)

    def group(self, rank: int, device: FakeDevice) -> "FakeGroup":
        return FakeGroup(self, rank, device)

    def meet(self) -> None:
        self._barrier.wait(LIMIT_SECONDS)

    def exchange(self, rank: int, x: torch.Tensor, parts: torch.Tensor) -> None:
        """Copy the x of all ranks to `parts` of this one."""
        self.num_exchanges[rank] += 1
        self._here[rank] = x
        self.meet()
        if len({(each.shape, each.dtype) for each in self._here}) > 1:
            raise DeviceError("ranks exchange tensors of different shapes")
        for part, each in zip(parts, self._here, strict=True):
            part.copy_(each)
        self.meet()  # no rank may overwrite what others still read


class FakeGroup:
    """The RankGroup of one rank."""

    def __init__(self, ranks: FakeRanks, rank: int, device: FakeDevice) -> None:
        self.rank = rank
        self.size = ranks.size
        self._ranks = ranks
        self._device = device
        self._joined = False

    def join(self, epoch: int, purpose: str = "steps") -> None:
        self._device.refuse_in_capture("a meeting")
        self._ranks.meetings[self.rank].append((epoch, purpose))
        self._ranks.meet()
        self._joined = True

    def leave(self) -> None:
        self._joined = False

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if not self._joined:
            raise DeviceError("an exchange before the ranks have met")
        if not self._device.holds(x):
            raise DeviceError("an exchange of host memory")
        parts = x.new_empty((self.size, *x.shape))

        def run() -> None:
            self._ranks.exchange(self.rank, on_host(x), on_host(parts))

        self._device.kernel(run)
        return parts
