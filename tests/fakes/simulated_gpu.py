"""A GPU of which only name, capability and memory are simulated."""

from collections.abc import Callable

import torch

from proto.settings.config import (
    GIB,
)
from worker.cuda.device import CudaDevice, DeviceMemory


class SimulatedGpu:
    """A CudaRuntime with fixed memory sizes; a step takes `peak` bytes, or runs out of memory."""

    def __init__(
        self,
        free: int,
        capability: tuple[int, int] = (9, 0),
        peak: int = GIB,
        total: int = 80 * GIB,
    ) -> None:
        self._free = free
        self._capability = capability
        self._peak = peak
        self._total = total

    def name(self) -> str:
        return "Some GPU"

    def capability(self) -> tuple[int, int]:
        return self._capability

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._free, self._total)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        if self._peak > self._free:
            raise torch.cuda.OutOfMemoryError("no room")
        return self._peak


def device_of(free: int, **gpu: object) -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0), SimulatedGpu(free, **gpu))  # type: ignore[arg-type]
