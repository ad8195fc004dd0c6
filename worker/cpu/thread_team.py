"""The OpenMP threads of a CPU worker: fewer of them while other programs use its cores.

The threads of a step meet at some 200 barriers. A thread that waits for a core, because another
program runs on it, makes all others wait as well: beside one busy process two threads on two cores
are slower than one. So the team gives up the threads that it would wait for, and takes them back
once their cores are free. While it is smaller its threads may run on any of its cores, and the
operating system keeps them apart from the other programs.

A program on the second hardware thread of a core slows a thread down without making it wait, and
changes nothing here.
"""

import ctypes
import logging
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import torch

from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.host_resources import cpu_limit
from worker.cpu.kernels import Kernels
from worker.host.memory_nodes import memory_placement
from worker.step.model_runner import (
    FinishedStep,
    GrammarMaskSource,
    ModelRunner,
    SyncModelRunner,
    no_grammars,
)

logger = logging.getLogger("tokend.worker")

_PERIOD: Final = 0.1
"""Seconds of steps between two looks at the threads."""
_LEAST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 8.0
"""Seconds until the team grows again. The pause doubles if it had to shrink right after that."""
_SPARE_CORES: Final = 0.5
"""What must be left of the cores beside a larger team."""
_PROC: Final = Path("/proc")


class ThreadTeam:
    """Sets how many threads compute the steps of this process.

    Created and called by the thread that runs the steps.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._most = torch.get_num_threads()
        self._threads = self._find_threads()
        self._homes = [os.sched_getaffinity(thread) for thread in self._threads]
        self._cpus = frozenset[int]().union(*self._homes)
        self._pause = _LEAST_PAUSE
        self._grown_at = 0.0
        self._begin_pause()
        self._begin_period()

    def after_step(self, seconds: float) -> None:
        """Count a step that took this long; every _PERIOD, resize the team if that is faster."""
        self._computed += seconds
        if self._computed >= _PERIOD:
            self._resize(self._best_size())
            self._begin_period()

    def _best_size(self) -> int:
        """Return the number of threads that is expected to be the fastest.

        A wait of one thread for a core makes all threads wait. So a team of n threads loses the
        share of time in which a thread waited, and a team of n - 1 loses one n-th of the speed. A
        larger team needs a core that other processes do not use.
        """
        size, now = len(self._threads), time.monotonic()
        waited = (_seconds_waited(self._threads) - self._waited) / self._computed
        if size > 1 and waited > 1 / size:
            if now - self._grown_at < 2 * self._pause:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return max(1, size - max(1, int(waited)))
        if size < self._most and now - self._paused_at >= self._pause:
            used = _seconds_used_by_others(self._cpus) - self._used
            left = self._most - used / (now - self._paused_at)
            self._begin_pause()
            if left >= size + _SPARE_CORES:
                self._grown_at = now
                return size + 1
        return size

    def _resize(self, size: int) -> None:
        """Set the number of threads. Those of a full team return to the CPUs that they began on."""
        if size == len(self._threads):
            return
        logger.debug("%d of %d threads compute", size, self._most)
        torch.set_num_threads(size)
        self._threads = self._find_threads()
        for thread, home in zip(self._threads, self._homes, strict=False):
            os.sched_setaffinity(thread, home if size == self._most else self._cpus)
        self._begin_pause()

    def _begin_period(self) -> None:
        self._computed, self._waited = 0.0, _seconds_waited(self._threads)

    def _begin_pause(self) -> None:
        self._paused_at, self._used = time.monotonic(), _seconds_used_by_others(self._cpus)

    def _find_threads(self) -> list[int]:
        """Return the system's ids of the threads, in their order."""
        found = (ctypes.c_int32 * torch.get_num_threads())()
        self._kernels.team_threads(found)
        return list(found)


class TeamModelRunner(SyncModelRunner):
    """A SyncModelRunner whose team of threads is resized between steps."""

    def __init__(self, runner: ModelRunner, team: ThreadTeam) -> None:
        super().__init__(runner)
        self._team = team

    def launch(
        self, step: SchedulerOutput, get_grammars: GrammarMaskSource = no_grammars
    ) -> FinishedStep:
        started = time.monotonic()
        finished = super().launch(step, get_grammars)
        self._team.after_step(time.monotonic() - started)
        return finished


def thread_team(kernels: Kernels) -> ThreadTeam | None:
    """Return the team of the calling thread; None where it cannot, or must not, be resized.

    On a machine with several memory nodes each thread has the weights that it reads on its own.
    Under a limit of processor time threads wait for that, too.
    """
    if torch.get_num_threads() < 2:
        return None
    if memory_placement() is not None or cpu_limit(Path("/")) is not None:
        return None
    try:
        return ThreadTeam(kernels)
    except OSError:  # the system does not say how long threads wait
        return None


def _seconds_waited(threads: Sequence[int]) -> float:
    """Return how long these threads of this process have waited for a core, all of them together.

    See "schedstats" in the documentation of Linux.
    """
    files = (_PROC / f"self/task/{thread}/schedstat" for thread in threads)
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def _seconds_used_by_others(cpus: Collection[int]) -> float:
    """Return how long processes other than this one have used these CPUs since the system started.

    Only differences mean anything. See proc_stat(5).
    """
    ticks = 0
    for line in (_PROC / "stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, values[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
