"""A device: the CPU under another name."""

from proto.settings.config import ServeConfig
from worker.cpu.device import CpuDevice


class NamedCpu(CpuDevice):
    def __init__(self, config: ServeConfig, index: int) -> None:
        super().__init__(config.device, parallel=config.parallel)

    @property
    def name(self) -> str:
        return f"example of {super().name}"
