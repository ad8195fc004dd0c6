"""Which device a worker gets: what was asked for, or the best that there is."""

import torch

from proto.config import ServeConfig
from proto.errors import ConfigError
from worker.device.base import Device
from worker.device.cpu import CpuDevice
from worker.device.cuda import CudaDevice, TorchCuda


def create_device(config: ServeConfig, rank: int) -> Device:
    """The device of the worker with this rank; "auto" is CUDA where torch has it.

    Each worker has the GPU whose number is its rank, of those that CUDA_VISIBLE_DEVICES leaves.
    Raises ConfigError for --device cuda where there is none, or fewer than workers.
    """
    wanted = config.device.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CpuDevice(config.device, num_workers=config.parallel.tensor_parallel_size)
    if not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: {_why_not()}; --device cpu works here", "device")
    size, found = config.parallel.tensor_parallel_size, torch.cuda.device_count()
    if size > found:
        raise ConfigError(
            f"--tensor-parallel-size {size}: each worker needs a GPU of its own, {found} found; "
            "--device cpu shares a model among workers without any",
            "tensor_parallel_size",
        )
    sizes = {torch.cuda.get_device_properties(each).total_memory for each in range(size)}
    if len(sizes) > 1 and config.scheduler.max_num_batched_tokens is None:
        raise ConfigError(
            f"--tensor-parallel-size {size}: the GPUs have {min(sizes)} to {max(sizes)} bytes of "
            "memory, so no step suits all of them; give --max-num-batched-tokens",
            "max_num_batched_tokens",
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return CudaDevice(device, TorchCuda(device), config.cache.gpu_memory_utilization)


def _why_not() -> str:
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is built without CUDA"
    return "torch finds no NVIDIA GPU"
