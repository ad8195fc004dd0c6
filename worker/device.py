"""What a worker computes on: arithmetic, threads and memory of the machine.

Knows nothing of models; the worker asks it which dtype to load, how many threads
to run and how much memory the KV cache may take.
"""

from fractions import Fraction
from pathlib import Path
from typing import Final, Protocol

import torch

from proto.config import GIB, CacheConfig, DeviceConfig, DType
from proto.cores import cores_of_worker
from proto.errors import ConfigError
from proto.memory import available_memory

DEFAULT_KV_CACHE_BYTES: Final = 4 * GIB
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MATRIX_FLAGS: Final = ("avx512_bf16", "amx_bf16")
"""CPU features that multiply bfloat16 matrices faster than float32 ones."""
_ALL: Final = Fraction(1)


class Device(Protocol):
    """One device of one worker."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors go."""
        ...

    @property
    def name(self) -> str:
        """For people: the hardware and how it is used."""
        ...

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """The torch dtype of a setting; "auto" is what the device does best."""
        ...

    def kv_cache_bytes(self, config: CacheConfig, part: Fraction = _ALL) -> int:
        """Memory for the KV pool beside what is taken now.

        part: of the pool, for a worker that has some of its heads; workers of one machine
        share its memory. Raises ConfigError for a setting that has no room.
        """
        ...

    def check_blocks(self, config: CacheConfig, bytes_per_token: int) -> None:
        """Raise ConfigError where a number of blocks is set that has no room."""
        ...

    def check_rows(self, num_rows: int, num_bytes: int, pool_bytes: int) -> None:
        """Raise ConfigError where the rows of so many sequences have no room beside the pool."""
        ...


class CpuDevice:
    """The CPU cores that this process may run on.

    `root` holds the `proc` and `sys` trees that describe the machine. num_workers: that share
    its cores.
    """

    def __init__(
        self, config: DeviceConfig, root: Path = Path("/"), *, num_workers: int = 1
    ) -> None:
        self._root = root
        self._model_name, self._flags = _read_cpuinfo(root)
        self.num_threads = config.cpu_threads or cores_of_worker(num_workers, root)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        """For example "AMD EPYC (2 threads, avx512_bf16)"."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self._model_name} ({', '.join((threads, *self.matrix_flags))})"

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """bfloat16 for "auto" where the CPU multiplies it in hardware, else float32."""
        if dtype == "auto":
            return torch.bfloat16 if self.matrix_flags else torch.float32
        return _DTYPES[dtype]

    def kv_cache_bytes(self, config: CacheConfig, part: Fraction = _ALL) -> int:
        """A part of the setting, or of 4 GiB but at most half of the memory that is free.

        Raises ConfigError with both numbers for a setting beyond the free memory.
        """
        wanted = config.kv_cache_memory
        if wanted is None:
            return int(min(DEFAULT_KV_CACHE_BYTES, available_memory(self._root) // 2) * part)
        self._check_room(wanted, f"--kv-cache-memory {wanted} ({_gib(wanted)})", "kv_cache_memory")
        return int(wanted * part)

    def check_blocks(self, config: CacheConfig, bytes_per_token: int) -> None:
        """As the Protocol says; the error has both numbers."""
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is not None:
            wanted = num_blocks * config.block_size * bytes_per_token
            what = f"--num-gpu-blocks-override {num_blocks}: {wanted} bytes ({_gib(wanted)})"
            self._check_room(wanted, what, "num_gpu_blocks_override")

    def check_rows(self, num_rows: int, num_bytes: int, pool_bytes: int) -> None:
        """As the Protocol says; the pool takes its memory only as it is used."""
        what = f"--max-num-seqs {num_rows}: {num_bytes} bytes ({_gib(num_bytes)}) of rows"
        self._check_room(num_bytes, what, "max_num_seqs", pool_bytes, " beside the KV pool")

    def _check_room(
        self, wanted: int, what: str, setting: str, taken: int = 0, beside: str = ""
    ) -> None:
        """taken: bytes of what is free that are spoken for, by what `beside` names."""
        free = max(0, available_memory(self._root) - taken)
        if wanted > free:
            raise ConfigError(
                f"{what} is more than the {free} bytes ({_gib(free)}) of memory that are "
                f"free{beside}",
                setting,
            )

    @property
    def matrix_flags(self) -> tuple[str, ...]:
        """What it has to multiply bfloat16 matrices with."""
        return tuple(flag for flag in _MATRIX_FLAGS if flag in self._flags)


def _read_cpuinfo(root: Path) -> tuple[str, frozenset[str]]:
    """Model name and feature flags of the first CPU, as far as the kernel gives them."""
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


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"
