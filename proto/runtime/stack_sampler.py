"""Sampled stacks of a thread, for profiles of the running daemon."""

import os
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Final

from proto.settings.profiler_config import ProfilerConfig

_SAMPLE_SECONDS: Final = 0.005
_MAX_DEPTH: Final = 128
_SUMMARY_LINES: Final = 50


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
