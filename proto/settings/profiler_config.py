"""Configuration of profiles: --profiler-config. Its keys are vLLM's, except max_seconds."""

import os
import time
from functools import lru_cache
from typing import Final, Literal

import msgspec

from proto.settings.json_flag import convert_object, flag_error, parse_json_flag

FIELD: Final = "profiler_config"
MAX_ITERATIONS: Final = 10_000
"""A step has up to ten thousand events, of which a worker writes a hundred thousand a second."""
MAX_SECONDS: Final = 600.0


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile records, and where its files go.

    torch_profiler_*: options of torch.profiler.profile in the workers.
    ignore_frontend: front ends are not sampled.
    delay_iterations: steps before a worker begins to record. max_iterations: steps that it records.
    max_seconds: after which all processes stop recording.
    """

    profiler: Literal["torch"]
    torch_profiler_dir: str
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    ignore_frontend: bool = False
    delay_iterations: int = 0
    max_iterations: int = 100
    max_seconds: float = 60.0

    def path(self, process: str, suffix: str) -> str:
        """Return the path of a new file of a process of this name, in the folder that it makes."""
        os.makedirs(self.torch_profiler_dir, exist_ok=True)
        name = f"{process}.{os.getpid()}.{time.monotonic_ns() // 1_000_000}.{suffix}"
        return os.path.join(self.torch_profiler_dir, name)


@lru_cache(maxsize=1)
def parse_profiler_config(text: str | None) -> ProfilerConfig | None:
    """Parse --profiler-config, a JSON text; None for none. Raises ConfigError naming the key."""
    if text is None:
        return None
    config = convert_object(FIELD, parse_json_flag(FIELD, text), ProfilerConfig)
    for key, low, high in (
        ("delay_iterations", 0, MAX_ITERATIONS),
        ("max_iterations", 1, MAX_ITERATIONS),
        ("max_seconds", 1.0, MAX_SECONDS),
    ):
        if not low <= (value := getattr(config, key)) <= high:
            raise flag_error(FIELD, f": {key} must be in [{low:g}, {high:g}], got {value:g}")
    if not config.torch_profiler_dir or "://" in config.torch_profiler_dir:
        raise flag_error(FIELD, ": torch_profiler_dir takes the path of a folder")
    folder = os.path.abspath(config.torch_profiler_dir)
    return msgspec.structs.replace(config, torch_profiler_dir=folder)
