"""The device of a worker, a CPU or a CUDA GPU: its dtypes and how its memory is divided.

Start with `create_device`. On a GPU the memory is divided like this:

    total     [ others | weights | largest step | KV pool .......... | left alone ]
              <-------------- gpu_memory_utilization ----------------->

The memory of the largest step is measured by running it, before the KV pool is allocated.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

import torch

from proto.config import (
    GIB,
    CacheConfig,
    DeviceConfig,
    DType,
    KVCacheDType,
    SchedulerConfig,
    ServeConfig,
)
from proto.errors import ConfigError
from proto.host_resources import available_memory, cores_of_worker

logger = logging.getLogger("tokend.device")

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The torch dtype of each `--dtype` setting except "auto"."""
ALL: Final = Fraction(1)
DEFAULT_KV_CACHE_BYTES: Final = 4 * GIB
_MATRIX_FLAGS: Final = ("avx512_bf16", "amx_bf16")
"""CPU features that multiply bfloat16 matrices faster than float32 ones."""
_FIRST_BFLOAT16_CAPABILITY: Final = (8, 0)
"""The first CUDA compute capability with matrix products of bfloat16."""
_STEP_TOKENS: Final = ((64 * GIB, 8192), (30 * GIB, 4096), (0, 2048))
"""(least bytes of GPU memory, default token budget of a step). From 2048 rows on, a matrix product
takes longer to compute than to read its weight; larger steps are fewer and longer."""


def gib(num_bytes: int) -> str:
    """Format a number of bytes for messages, for example "4.0 GiB"."""
    return f"{num_bytes / GIB:.1f} GiB"


def create_device(config: ServeConfig, rank: int) -> "Device":
    """Return the device of the worker with this rank; "auto" means CUDA if torch finds a GPU.

    The worker of rank i uses the i-th GPU that CUDA_VISIBLE_DEVICES leaves.
    Raises ConfigError for --device cuda without a GPU, or with fewer GPUs than workers.
    """
    setting = config.device.device
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
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
    return CudaDevice(device, CudaRuntime(device), config.cache.gpu_memory_utilization)


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is built without CUDA"
    return "torch finds no NVIDIA GPU"


class Device(ABC):
    """The device of one worker.

    matrix_flags: CPU features that multiply bfloat16 matrices; empty on a GPU.
    """

    torch_device: torch.device
    matrix_flags: tuple[str, ...] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """A description for people: the hardware and how it is used."""

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
    def kv_cache_bytes(self, config: CacheConfig, share: Fraction = ALL, reserved: int = 0) -> int:
        """Return the bytes for the KV pool, out of the memory that is free now.

        share: part of the configured size that this worker gets, as workers of one machine share
        its memory. reserved: bytes to leave free for the largest step. Raises ConfigError for a
        setting beyond the free memory.
        """

    @abstractmethod
    def check_rows(self, num_rows: int, num_bytes: int, pool_bytes: int) -> None:
        """Raise ConfigError if the input batch of `num_rows` rows needs more than the free memory.

        pool_bytes: memory that the KV pool will take.
        """

    def check_blocks(self, config: CacheConfig, bytes_per_token: int) -> None:
        """Raise ConfigError if --num-gpu-blocks-override needs more than the free memory."""
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is not None:
            num_bytes = num_blocks * config.block_size * bytes_per_token
            what = f"--num-gpu-blocks-override {num_blocks}: {num_bytes} bytes ({gib(num_bytes)})"
            self._check_free(num_bytes, what, "num_gpu_blocks_override")

    @abstractmethod
    def _check_free(
        self, num_bytes: int, what: str, setting: str, reserved: int = 0, beside: str = ""
    ) -> None:
        """Raise ConfigError if fewer than num_bytes + reserved bytes are free."""


class CpuDevice(Device):
    """The CPU cores that this process may run on.

    root: folder with the `proc` and `sys` trees that describe the machine. num_workers: number of
    workers that share its cores.
    """

    torch_device = torch.device("cpu")

    def __init__(
        self, config: DeviceConfig, root: Path = Path("/"), *, num_workers: int = 1
    ) -> None:
        self._root = root
        self._model_name, flags = _read_cpuinfo(root)
        self.matrix_flags = tuple(flag for flag in _MATRIX_FLAGS if flag in flags)
        self.num_threads = config.cpu_threads or cores_of_worker(num_workers, root)

    @property
    def name(self) -> str:
        """For example "AMD EPYC (2 threads, avx512_bf16)"."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self._model_name} ({', '.join((threads, *self.matrix_flags))})"

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

    def kv_cache_bytes(self, config: CacheConfig, share: Fraction = ALL, reserved: int = 0) -> int:
        """Return the share of the setting, or of 4 GiB but at most half of the free memory."""
        configured = config.kv_cache_memory
        if configured is None:
            return int(min(DEFAULT_KV_CACHE_BYTES, available_memory(self._root) // 2) * share)
        what = f"--kv-cache-memory {configured} ({gib(configured)})"
        self._check_free(configured, what, "kv_cache_memory")
        return int(configured * share)

    def check_rows(self, num_rows: int, num_bytes: int, pool_bytes: int) -> None:
        # The pool counts as taken: its pages are allocated only when they are first written.
        what = f"--max-num-seqs {num_rows}: {num_bytes} bytes ({gib(num_bytes)}) of rows"
        self._check_free(num_bytes, what, "max_num_seqs", pool_bytes, " beside the KV pool")

    def _check_free(
        self, num_bytes: int, what: str, setting: str, reserved: int = 0, beside: str = ""
    ) -> None:
        free = max(0, available_memory(self._root) - reserved)
        if num_bytes > free:
            raise ConfigError(
                f"{what} is more than the {free} bytes ({gib(free)}) of memory that are "
                f"free{beside}",
                setting,
            )


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
    """One CUDA GPU. utilization: part of its memory that all processes on it may take together."""

    def __init__(self, device: torch.device, runtime: CudaRuntime, utilization: float) -> None:
        self.torch_device = device
        self._runtime = runtime
        self._utilization = utilization

    @property
    def name(self) -> str:
        """For example "NVIDIA H100 80GB HBM3 (79.2 GiB)"."""
        return f"{self._runtime.name()} ({gib(self._runtime.memory().total)})"

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
                f"the largest step has no room: beside the weights {free} bytes ({gib(free)}) of "
                f"{total} ({gib(total)}) are free; give a smaller --max-num-batched-tokens or "
                "--max-num-seqs",
                "max_num_batched_tokens",
            ) from None
        logger.info("the largest step takes %s beside the weights", gib(peak))
        return peak

    def kv_cache_bytes(self, config: CacheConfig, share: Fraction = ALL, reserved: int = 0) -> int:
        """Return the share of the setting, or all that --gpu-memory-utilization leaves."""
        free, total = self._runtime.memory()
        if config.kv_cache_memory is not None:
            num_bytes = int(config.kv_cache_memory * share)
            what = f"--kv-cache-memory {num_bytes} ({gib(num_bytes)})"
            self._check_free(num_bytes, what, "kv_cache_memory", reserved)
            return num_bytes
        budget = int(total * self._utilization)
        left = budget - (total - free) - reserved
        if left <= 0:
            raise ConfigError(
                f"--gpu-memory-utilization {self._utilization} leaves nothing for the KV pool: it "
                f"allows {budget} bytes ({gib(budget)}) of {total}, {total - free} "
                f"({gib(total - free)}) are taken and the largest step needs {reserved} "
                f"({gib(reserved)})",
                "gpu_memory_utilization",
            )
        return left

    def check_rows(self, num_rows: int, num_bytes: int, pool_bytes: int) -> None:
        # Rows are in host memory, the pool is not.
        free = available_memory()
        if num_bytes > free:
            raise ConfigError(
                f"--max-num-seqs {num_rows}: {num_bytes} bytes ({gib(num_bytes)}) of rows is more "
                f"than the {free} bytes ({gib(free)}) of memory that are free",
                "max_num_seqs",
            )

    def _check_free(
        self, num_bytes: int, what: str, setting: str, reserved: int = 0, beside: str = ""
    ) -> None:
        free = max(0, self._runtime.memory().free - reserved)
        if num_bytes > free:
            raise ConfigError(
                f"{what} is more than the {free} bytes ({gib(free)}) of the device's memory that "
                f"are free{beside}",
                setting,
            )
