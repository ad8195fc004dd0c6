"""A device: the CPU under another name."""

from proto.settings.config import ServeConfig
from worker.cpu.device import CpuDevice


class NamedCpu(CpuDevice):
    def __init__(self, config: ServeConfig, rank: int) -> None:
        super().__init__(config.device, num_workers=config.parallel.tensor_parallel_size)

    @property
    def name(self) -> str:
        return f"example of {super().name}"
