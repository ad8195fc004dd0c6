"""Which device a worker has: the only place that names devices.

One from outside is a subclass of `Device`, constructed with (ServeConfig, index of the worker).
"""

import torch

from proto.runtime.plugins import load_part
from proto.settings.config import PARTS, ServeConfig
from worker.device import Device


def create_device(config: ServeConfig, index: int, starts_alone: bool = False) -> Device:
    """Return the device of the worker with this index; "auto" means CUDA if torch finds a GPU.

    A CPU without compiled kernels computes in plain torch. The kernels of this process are held to
    --cpu-kernels from now on. starts_alone: other engines of the daemon do not start now.
    Raises ConfigError for a device from outside that cannot be loaded, for --device cuda without a
    GPU, or with fewer GPUs than workers, and for kernels that cannot run here.
    """
    setting, parallel, alone = config.device.device, config.parallel, starts_alone
    if setting not in PARTS["device"][1]:
        outside: Device = load_part("device", setting, "device", Device)(config, index)
        return outside
    if setting == "cuda" or (setting == "auto" and torch.cuda.is_available()):
        from worker.cuda.device import create_cuda_device

        return create_cuda_device(config, index)
    from worker.reference.device import ReferenceDevice

    if setting == "reference":
        return ReferenceDevice(config.device, parallel=parallel, starts_alone=alone)
    has_standby = config.reliability.standby_workers > 0
    from worker.cpu.device import CpuDevice
    from worker.cpu.kernels import KernelsUnavailableError, limit_kernels

    limit_kernels(config.device.cpu_kernels)
    try:
        return CpuDevice(
            config.device, parallel=parallel, starts_alone=alone, has_standby=has_standby
        )
    except KernelsUnavailableError as reason:
        return ReferenceDevice(
            config.device, parallel=parallel, starts_alone=alone, reason=str(reason)
        )
