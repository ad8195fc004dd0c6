"""A RankGroup between FakeDevices of one process, one thread each: what is queued, and what is not.

An exchange is a kernel of the device: inside a capture it is recorded and happens again in each
replay. Who comes with another shape than the others, or does not come, is an error.
"""

import threading

import torch

from tests.fakes.fake_device import DeviceError, FakeDevice, on_host

LIMIT_SECONDS = 60.0


class FakeRanks:
    """What the ranks share. meetings: what each of them has met for."""

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
        """The x of all ranks to `parts` of this one."""
        self.num_exchanges[rank] += 1
        self._here[rank] = x
        self.meet()
        if len({(each.shape, each.dtype) for each in self._here}) > 1:
            raise DeviceError("ranks exchange tensors of different shapes")
        for part, each in zip(parts, self._here, strict=True):
            part.copy_(each)
        self.meet()  # nobody goes on to write what others still read


class FakeGroup:
    """RankGroup of one of them."""

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
