"""Which device a worker gets: what was asked for, or the best that there is."""

import torch

from proto.config import ServeConfig
from proto.errors import ConfigError
from worker.device.base import Device
from worker.device.cpu import CpuDevice
from worker.device.cuda import CudaDevice, TorchCuda


def create_device(config: ServeConfig, rank: int) -> Device:
    """The device of the worker with this rank; "auto" is CUDA where torch has it.

    Raises ConfigError for --device cuda where there is none, or fewer than workers, and for several
    workers of one model.
    """
    wanted = config.device.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CpuDevice(config.device, num_workers=config.parallel.tensor_parallel_size)
    if not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: {_why_not()}; --device cpu works here", "device")
    if config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            "--tensor-parallel-size: several workers share a model on CPUs only; give --device cpu",
            "tensor_parallel_size",
        )
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--device cuda: worker {rank} has no GPU, {torch.cuda.device_count()} found", "device"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return CudaDevice(device, TorchCuda(device), config.cache.gpu_memory_utilization)


def _why_not() -> str:
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is built without CUDA"
    return "torch finds no NVIDIA GPU"
