"""What a worker asks of the device that it computes on; knows none in particular."""

from collections.abc import Callable
from fractions import Fraction
from typing import Final, Protocol

import torch

from proto.config import GIB, CacheConfig, DType, KVCacheDType, SchedulerConfig

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Torch's dtype of each setting but "auto"."""
ALL: Final = Fraction(1)


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

    @property
    def matrix_flags(self) -> tuple[str, ...]:
        """Features of a CPU that multiply bfloat16 matrices; none of another device."""
        ...

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """The torch dtype of a setting; "auto" is what the device does best."""
        ...

    def step_tokens(self, config: SchedulerConfig) -> int:
        """The token budget of a step: what is set, or what suits the device."""
        ...

    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        """Raise ConfigError for K and V that no kernel of the device reads."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """Bytes that the largest step takes beside weights and KV pool; `run` computes it."""
        ...

    def kv_cache_bytes(self, config: CacheConfig, part: Fraction = ALL, beside: int = 0) -> int:
        """Memory for the KV pool beside what is taken now, and `beside` more bytes.

        part: of the pool that is asked for, for a worker that has some of the heads; workers
        of one machine share its memory. Raises ConfigError for a setting that has no room.
        """
        ...

    def check_blocks(self, config: CacheConfig, bytes_per_token: int) -> None:
        """Raise ConfigError where a number of blocks is set that has no room."""
        ...

    def check_rows(self, num_rows: int, num_bytes: int, pool_bytes: int) -> None:
        """Raise ConfigError where the rows of so many sequences have no room beside the pool."""
        ...


def gib(number: int) -> str:
    """A number of bytes, for people."""
    return f"{number / GIB:.1f} GiB"
