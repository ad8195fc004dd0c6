"""One CUDA device: its dtypes, and how its memory is shared between weights, steps and KV pool.

    total     [ others | weights | largest step | KV pool .......... | left alone ]
              <-------------- gpu_memory_utilization ----------------->

What the largest step takes is measured by running it, before there is a pool. Knows nothing
of models; how a device is asked for its numbers is a Protocol, for machines without one.
"""

import logging
from collections.abc import Callable
from fractions import Fraction
from typing import Final, NamedTuple, Protocol

import torch

from proto.config import GIB, CacheConfig, DType, KVCacheDType, SchedulerConfig
from proto.errors import ConfigError
from proto.host_resources import available_memory
from worker.device.base import ALL, DTYPES, gib

logger = logging.getLogger("tokend.device")

_BFLOAT16_SINCE: Final = (8, 0)
"""The first compute capability with matrix products of bfloat16."""


_STEP_TOKENS: Final = ((64 * GIB, 8192), (30 * GIB, 4096), (0, 2048))
"""Bytes of memory from which a step has so many tokens. A matrix product of 2048 rows or more
reads its weight for less than it computes; the rest makes steps fewer, and longer."""


class Room(NamedTuple):
    """Bytes of the device's memory."""

    free: int
    total: int


class CudaRuntime(Protocol):
    """What is asked of torch.cuda."""

    def name(self) -> str:
        """As the driver calls the device."""
        ...

    def capability(self) -> tuple[int, int]:
        """Its compute capability, for example (9, 0)."""
        ...

    def room(self) -> Room:
        """Free memory, that which torch keeps for later given back before, and all there is."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """Bytes that tensors took at most while `run` computed, beyond those before."""
        ...


class TorchCuda:
    """CudaRuntime of a device of this machine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self._device)

    def room(self) -> Room:
        torch.cuda.empty_cache()
        return Room(*torch.cuda.mem_get_info(self._device))

    def peak_of(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class CudaDevice:
    """A Device; `utilization` is the part of its memory that may be taken, others' included."""

    def __init__(self, device: torch.device, runtime: CudaRuntime, utilization: float) -> None:
        self._device = device
        self._runtime = runtime
        self._utilization = utilization

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def name(self) -> str:
        """For example "NVIDIA H100 80GB HBM3 (79.2 GiB)"."""
        return f"{self._runtime.name()} ({gib(self._runtime.room().total)})"

    @property
    def matrix_flags(self) -> tuple[str, ...]:
        return ()

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """bfloat16 for "auto" where the device multiplies it, else float16."""
        if dtype != "auto":
            return DTYPES[dtype]
        has_bfloat16 = self._runtime.capability() >= _BFLOAT16_SINCE
        return torch.bfloat16 if has_bfloat16 else torch.float16

    def step_tokens(self, config: SchedulerConfig) -> int:
        """What is set, or as many as keep the device busy beside what they take of its memory."""
        if config.max_num_batched_tokens is not None:
            return config.max_num_batched_tokens
        total = self._runtime.room().total
        return next(tokens for least, tokens in _STEP_TOKENS if total >= least)

    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        """Any; what an attention backend does not read it refuses itself."""

    def peak_of(self, run: Callable[[], None]) -> int:
        """As the Protocol says; raises ConfigError where the step has no room at all."""
        try:
            peak = self._runtime.peak_of(run)
        except torch.cuda.OutOfMemoryError:
            free, total = self._runtime.room()
            raise ConfigError(
                f"the largest step has no room: beside the weights {free} bytes ({gib(free)}) of "
                f"{total} ({gib(total)}) are free; give a smaller --max-num-batched-tokens or "
                "--max-num-seqs",
                "max_num_batched_tokens",
            ) from None
        logger.info("the largest step takes %s beside the weights", gib(peak))
        return peak

    def kv_cache_bytes(self, config: CacheConfig, part: Fraction = ALL, beside: int = 0) -> int:
        """A part of the setting, or all that --gpu-memory-utilization leaves.

        Raises ConfigError with numbers.
        """
        free, total = self._runtime.room()
        if config.kv_cache_memory is not None:
            wanted = int(config.kv_cache_memory * part)
            self._check_room(
                wanted, f"--kv-cache-memory {wanted} ({gib(wanted)})", "kv_cache_memory", beside
            )
            return wanted
        budget = int(total * self._utilization)
        left = budget - (total - free) - beside
        if left <= 0:
            raise ConfigError(
                f"--gpu-memory-utilization {self._utilization} leaves nothing for the KV pool: it "
                f"allows {budget} bytes ({gib(budget)}) of {total}, {total - free} "
                f"({gib(total - free)}) are taken and the largest step needs {beside} "
                f"({gib(beside)})",
                "gpu_memory_utilization",
            )
        return left

    def check_blocks(self, config: CacheConfig, bytes_per_token: int) -> None:
        """As the Protocol says; the error has both numbers."""
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is not None:
            wanted = num_blocks * config.block_size * bytes_per_token
            what = f"--num-gpu-blocks-override {num_blocks}: {wanted} bytes ({gib(wanted)})"
            self._check_room(wanted, what, "num_gpu_blocks_override", 0)

    def check_rows(self, num_rows: int, num_bytes: int, pool_bytes: int) -> None:
        """As the Protocol says; rows are on the host, where there is no pool."""
        free = available_memory()
        if num_bytes > free:
            raise ConfigError(
                f"--max-num-seqs {num_rows}: {num_bytes} bytes ({gib(num_bytes)}) of rows is more "
                f"than the {free} bytes ({gib(free)}) of memory that are free",
                "max_num_seqs",
            )

    def _check_room(self, wanted: int, what: str, setting: str, beside: int) -> None:
        free = max(0, self._runtime.room().free - beside)
        if wanted > free:
            raise ConfigError(
                f"{what} is more than the {free} bytes ({gib(free)}) of the device's memory that "
                "are free",
                setting,
            )
