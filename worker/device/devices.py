"""The device of a worker, a CPU or a CUDA GPU: its dtypes and how its memory is divided.

Start with `create_device`. On a GPU the memory is divided like this:

    total     [ others | weights | largest step | KV pool .......... | left alone ]
              <-------------- gpu_memory_utilization ----------------->

The memory of the largest step is measured by running it, before the KV pool is allocated.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch

from proto.config import (
    DEFAULT_POOL_SHARE,
    GIB,
    CacheConfig,
    DeviceConfig,
    DType,
    KVCacheDType,
    SchedulerConfig,
    ServeConfig,
    memory_size,
)
from proto.errors import ConfigError
from proto.host_resources import available_memory, cores_of_worker, is_memory_limited
from worker.build_kernels import machine_variants
from worker.kernels import limit_kernels

logger = logging.getLogger("tokend.device")

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The torch dtype of each `--dtype` setting except "auto"."""
_MATRIX_FLAGS: Final = ("avx512_bf16", "amx_bf16")
"""CPU features that multiply bfloat16 matrices faster than float32 ones."""
_FIRST_BFLOAT16_CAPABILITY: Final = (8, 0)
"""The first CUDA compute capability with matrix products of bfloat16."""
_STEP_TOKENS: Final = ((64 * GIB, 8192), (30 * GIB, 4096), (0, 2048))
"""(least bytes of GPU memory, default token budget of a step). From 2048 rows on, a matrix product
takes longer to compute than to read its weight; larger steps are fewer and longer."""


def create_device(config: ServeConfig, rank: int) -> "Device":
    """Return the device of the worker with this rank; "auto" means CUDA if torch finds a GPU.

    The worker of rank i uses the i-th GPU that CUDA_VISIBLE_DEVICES leaves. On a CPU the kernels of
    this process are held to --cpu-kernels from now on.
    Raises ConfigError for --device cuda without a GPU, or with fewer GPUs than workers, and for
    kernels that cannot run here.
    """
    setting = config.device.device
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        limit_kernels(config.device.cpu_kernels)
        return CpuDevice(config.device, num_workers=config.parallel.tensor_parallel_size)
    if not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: {_why_no_cuda()}; --device cpu works here", "device")
    size, found = config.parallel.tensor_parallel_size, torch.cuda.device_count()
    if size > found:
        raise ConfigError(
            f"--tensor-parallel-size {size}: each worker needs a GPU of its own, {found} found; "
            "--device cpu shares a model among workers without any",
            "tensor_parallel_size",
        )
    sizes = {torch.cuda.get_device_properties(index).total_memory for index in range(size)}
    if len(sizes) > 1 and config.scheduler.max_num_batched_tokens is None:
        raise ConfigError(
            f"--tensor-parallel-size {size}: the GPUs have {min(sizes)} to {max(sizes)} bytes of "
            "memory, so no step suits all of them; give --max-num-batched-tokens",
            "max_num_batched_tokens",
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return CudaDevice(device, CudaRuntime(device))


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is built without CUDA"
    return "torch finds no NVIDIA GPU"


class Device(ABC):
    """The device of one worker.

    matrix_flags: CPU features that multiply bfloat16 matrices; empty on a GPU.
    shares_memory: whether all workers, and the host, have the same memory.
    """

    torch_device: torch.device
    matrix_flags: tuple[str, ...] = ()
    shares_memory: bool

    @property
    @abstractmethod
    def name(self) -> str:
        """A description for people: the hardware and how it is used."""

    @property
    @abstractmethod
    def memory_name(self) -> str:
        """The memory that weights and KV take, in words."""

    @abstractmethod
    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """Return the torch dtype of a setting; "auto" is the fastest one of the device."""

    @abstractmethod
    def step_tokens(self, config: SchedulerConfig) -> int:
        """Return the token budget of a step: the setting, or a default of the device."""

    @abstractmethod
    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        """Raise ConfigError for a KV dtype that no kernel of the device reads."""

    @abstractmethod
    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the bytes that the largest step needs beside weights and KV pool.

        run: computes that step.
        """

    @abstractmethod
    def free_bytes(self, config: CacheConfig) -> int:
        """Return the bytes that weights, steps and KV pool may take now."""

    @abstractmethod
    def default_pool_bytes(self, left: int) -> int:
        """Return the size of a KV pool without a setting. left: bytes beside weights and steps."""

    @abstractmethod
    def kv_cache_bytes(self, config: CacheConfig, planned: int, peak: int) -> int:
        """Return the bytes of this worker's KV pool, once the weights are loaded.

        planned: by the sizes of the files. peak: bytes of the largest step. Raises ConfigError if
        they are not free.
        """


class CpuDevice(Device):
    """The CPU cores that this process may run on, with the instructions that --cpu-kernels allows.

    root: folder with the `proc` and `sys` trees that describe the machine. num_workers: number of
    workers that share its cores.
    """

    torch_device = torch.device("cpu")
    shares_memory = True

    def __init__(
        self, config: DeviceConfig, root: Path = Path("/"), *, num_workers: int = 1
    ) -> None:
        self._root = root
        self._model_name, flags = _read_cpuinfo(root)
        self._limit = "" if config.cpu_kernels == "auto" else config.cpu_kernels
        for variant in machine_variants():
            if variant.name == self._limit:
                flags &= variant.cpu_flags
        self.matrix_flags = tuple(flag for flag in _MATRIX_FLAGS if flag in flags)
        self.num_threads = config.cpu_threads or cores_of_worker(num_workers, root)

    @property
    def name(self) -> str:
        """For example "AMD EPYC (2 threads, avx512_bf16)"."""
        facts = [f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"]
        facts += self.matrix_flags
        if self._limit:
            facts.append(f"kernels held to {self._limit}")
        return f"{self._model_name} ({', '.join(facts)})"

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """Return the dtype; "auto" is bfloat16 if the CPU multiplies it in hardware."""
        if dtype == "auto":
            return torch.bfloat16 if self.matrix_flags else torch.float32
        return DTYPES[dtype]

    def step_tokens(self, config: SchedulerConfig) -> int:
        return config.step_tokens

    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        if setting == "fp8":
            raise ConfigError(
                "--kv-cache-dtype fp8 needs --device cuda; a CPU has int8", "kv_cache_dtype"
            )

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return 0 without running: the operating system provides a step's memory on demand."""
        return 0

    @property
    def memory_name(self) -> str:
        limited = is_memory_limited(self._root)
        return "memory of this container" if limited else "memory of this machine"

    def free_bytes(self, config: CacheConfig) -> int:
        return available_memory(self._root)

    def default_pool_bytes(self, left: int) -> int:
        """Return DEFAULT_POOL_SHARE of it: other programs take more now and then."""
        return int(left * DEFAULT_POOL_SHARE)

    def kv_cache_bytes(self, config: CacheConfig, planned: int, peak: int) -> int:
        """Return the planned size: weights of mapped files would count as free memory now."""
        return planned


def cpu_model_name() -> str:
    """Return the name of the processor."""
    return _read_cpuinfo(Path("/"))[0]


def _read_cpuinfo(root: Path) -> tuple[str, frozenset[str]]:
    """Return model name and feature flags of the first CPU, as far as /proc/cpuinfo has them."""
    name, flags = "CPU", frozenset[str]()
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return name, flags
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("flags", "Features"):
            flags = frozenset(value.split())
    return name, flags


class DeviceMemory(NamedTuple):
    """Bytes of a GPU's memory."""

    free: int
    total: int


class CudaRuntime:
    """The calls of torch.cuda that CudaDevice makes; tests replace it by a made-up GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def capability(self) -> tuple[int, int]:
        """Return the compute capability, for example (9, 0)."""
        return torch.cuda.get_device_capability(self._device)

    def memory(self) -> DeviceMemory:
        """Return free and total memory after emptying torch's cache."""
        torch.cuda.empty_cache()
        return DeviceMemory(*torch.cuda.mem_get_info(self._device))

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the most bytes that tensors took while `run` computed, beyond those before."""
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class CudaDevice(Device):
    """One CUDA GPU."""

    shares_memory = False

    def __init__(self, device: torch.device, runtime: CudaRuntime) -> None:
        self.torch_device = device
        self._runtime = runtime

    @property
    def name(self) -> str:
        """For example "NVIDIA H100 80GB HBM3 (79.2 GiB)"."""
        return f"{self._runtime.name()} ({memory_size(self._runtime.memory().total)})"

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """Return the dtype; "auto" is bfloat16 if the GPU multiplies it, else float16."""
        if dtype != "auto":
            return DTYPES[dtype]
        has_bfloat16 = self._runtime.capability() >= _FIRST_BFLOAT16_CAPABILITY
        return torch.bfloat16 if has_bfloat16 else torch.float16

    def step_tokens(self, config: SchedulerConfig) -> int:
        """Return the setting, or a default by the size of the GPU's memory."""
        if config.max_num_batched_tokens is not None:
            return config.max_num_batched_tokens
        total = self._runtime.memory().total
        return next(tokens for least_bytes, tokens in _STEP_TOKENS if total >= least_bytes)

    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        """Accept every dtype; attention backends refuse the ones they cannot read."""

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run the largest step and return its memory; raise ConfigError if it does not fit."""
        try:
            peak = self._runtime.peak_bytes(run)
        except torch.cuda.OutOfMemoryError:
            free, total = self._runtime.memory()
            raise ConfigError(
                f"the largest step has no room: beside the weights {free} bytes "
                f"({memory_size(free)}) of {total} ({memory_size(total)}) are free; give a smaller "
                "--max-num-batched-tokens or --max-num-seqs",
                "max_num_batched_tokens",
            ) from None
        logger.info("the largest step takes %s beside the weights", memory_size(peak))
        return peak

    @property
    def memory_name(self) -> str:
        return "memory of the GPU"

    def free_bytes(self, config: CacheConfig) -> int:
        """Return what --gpu-memory-utilization leaves; with a pool of a fixed size, all of it."""
        free, total = self._runtime.memory()
        if config.pool_setting is not None:
            return free
        return int(total * config.gpu_memory_utilization) - (total - free)

    def default_pool_bytes(self, left: int) -> int:
        """Return all of it: --gpu-memory-utilization leaves a share already."""
        return left

    def kv_cache_bytes(self, config: CacheConfig, planned: int, peak: int) -> int:
        """Return the planned size of a pool with a setting, else all that is left now."""
        free, total = self._runtime.memory()
        left = self.free_bytes(config) - peak
        if config.pool_setting is not None:
            if planned > left:
                raise ConfigError(
                    f"the KV pool of {planned} bytes ({memory_size(planned)}) is more than the "
                    f"{left} bytes ({memory_size(left)}) of the device's memory that are free "
                    "beside the largest step",
                    config.pool_setting,
                )
            return planned
        if left <= 0:
            raise ConfigError(
                f"--gpu-memory-utilization {config.gpu_memory_utilization} leaves nothing for the "
                f"KV pool: it allows {left + peak + total - free} bytes of {total} "
                f"({memory_size(total)}), {total - free} ({memory_size(total - free)}) are taken "
                f"and the largest step needs {peak} ({memory_size(peak)})",
                "gpu_memory_utilization",
            )
        return left
