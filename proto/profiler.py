"""Profiles of the running daemon: the setting --profiler-config, messages, and sampled stacks.

    POST /start_profile   engine ── ProfileCall(start) ──▶ workers: torch's profiler records steps
                          engine and front ends sample the stacks of their main threads
    POST /stop_profile    engine ── ProfileCall(stop) ──▶ workers write a trace each
                          engine and front ends write their stacks

Keys of the setting are vLLM's, except max_seconds. A profile that no call ends is discarded with
its process.
"""

import os
import sys
import threading
import time
from collections import Counter
from functools import lru_cache
from types import FrameType
from typing import Any, Final, Literal

import msgspec

from proto.errors import ConfigError, shown

FIELD: Final = "profiler_config"
MAX_ITERATIONS: Final = 10_000
"""A step has up to ten thousand events, of which a worker writes a hundred thousand a second."""
MAX_SECONDS: Final = 600.0
_SAMPLE_SECONDS: Final = 0.005
_MAX_DEPTH: Final = 128
_SUMMARY_LINES: Final = 50


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    try:
        document: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _error(f" takes JSON: {error}") from None
    known = ProfilerConfig.__struct_fields__
    if isinstance(document, dict) and (unknown := sorted(document.keys() - set(known))):
        raise _error(f" has no {', '.join(map(shown, unknown))}; it has {', '.join(known)}")
    try:
        config = msgspec.convert(document, ProfilerConfig)
    except msgspec.ValidationError as error:
        raise _error(f": {error}") from None
    for key, low, high in (
        ("delay_iterations", 0, MAX_ITERATIONS),
        ("max_iterations", 1, MAX_ITERATIONS),
        ("max_seconds", 1.0, MAX_SECONDS),
    ):
        if not low <= (value := getattr(config, key)) <= high:
            raise _error(f": {key} must be in [{low:g}, {high:g}], got {value:g}")
    if not config.torch_profiler_dir or "://" in config.torch_profiler_dir:
        raise _error(": torch_profiler_dir takes the path of a folder")
    folder = os.path.abspath(config.torch_profiler_dir)
    return msgspec.structs.replace(config, torch_profiler_dir=folder)


def _error(what: str) -> ConfigError:
    return ConfigError(f"--profiler-config{what}", FIELD)


ProfileAction = Literal["start", "stop", "discard"]


class ProfileCall(msgspec.Struct, array_like=True, tag=30, frozen=True):
    """Engine → worker: begin a profile, write it, or drop it.

    number: of the call, in the order of their sending. Exactly one ProfileReply follows.
    """

    epoch: int
    number: int
    action: ProfileAction


class ProfileReply(msgspec.Struct, array_like=True, tag=31, frozen=True):
    """Worker → engine. path: of the trace that was written. error: why the call failed, or ""."""

    epoch: int
    rank: int
    number: int
    path: str = ""
    error: str = ""


class StackSampler:
    """Samples the Python stack of one thread, some 200 times a second, in a thread of its own.

    The files have the stacks in the format of flame graphs (`outer;inner 12`: 12 samples) and the
    functions with most samples. Functions that are compiled are not on the stacks.
    process: name for the files.
    """

    def __init__(self, config: ProfilerConfig, process: str) -> None:
        self._config = config
        self._process = process
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample the calling thread; drops samples that were not written."""
        self.discard()
        os.makedirs(self._config.torch_profiler_dir, exist_ok=True)
        self._stopped.clear()
        self._thread = threading.Thread(
            target=self._sample, args=(threading.get_ident(),), name="profiler", daemon=True
        )
        self._thread.start()

    def stop(self) -> list[str]:
        """Write the samples; return the paths, none if it had not begun. Raises OSError."""
        if self._thread is None:
            return []
        counts = self.discard()
        stacks = [f"{';'.join(stack)} {count}\n" for stack, count in sorted(counts.items())]
        paths = []
        for suffix, lines in (("stacks.txt", stacks), ("summary.txt", _summary(counts))):
            paths.append(self._config.path(self._process, suffix))
            with open(paths[-1], "w", encoding="utf-8") as file:
                file.writelines(lines)
        return paths

    def discard(self) -> Counter[tuple[str, ...]]:
        """Stop sampling; return the samples by stack, from the outermost function inwards."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
        counts, self._counts = self._counts, Counter()
        return counts

    def _sample(self, thread: int) -> None:
        end = time.monotonic() + self._config.max_seconds
        while frame := sys._current_frames().get(thread):
            self._counts[_stack_of(frame)] += 1
            if self._stopped.wait(_SAMPLE_SECONDS) or time.monotonic() > end:
                break


def _stack_of(frame: FrameType | None) -> tuple[str, ...]:
    names: list[str] = []
    while frame is not None and len(names) < _MAX_DEPTH:
        names.append(f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(names))


def _summary(counts: Counter[tuple[str, ...]]) -> list[str]:
    """Return a table of functions by their samples: as the innermost one, and in all."""
    innermost: Counter[str] = Counter()
    anywhere: Counter[str] = Counter()
    for stack, count in counts.items():
        innermost[stack[-1]] += count
        for name in set(stack):
            anywhere[name] += count
    total = max(1, counts.total())
    lines = [f"{counts.total()} samples\n", "   self   total  function\n"]
    for name, _ in sorted(anywhere.items(), key=lambda item: (-innermost[item[0]], -item[1])):
        shares = f"{innermost[name] / total:7.1%} {anywhere[name] / total:7.1%}"
        lines.append(f"{shares}  {name}\n")
    return lines[: _SUMMARY_LINES + 2]
