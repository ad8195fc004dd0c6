"""A simulation's own trace, to be looked at as one of a daemon.

Lines are those of the recorder, on the virtual clock; jobs are those of the replayed trace.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.observers import PoolObserver
from engine_core.queues.base import RequestQueue
from engine_core.request import Request
from engine_core.scheduler.observer import SchedulerObserver
from engine_core.scheduler.pin_order import Pin
from engine_core.scheduler.step_plan import StepPlan
from engine_core.trace.file import TraceFile
from engine_core.trace.recorder import Recorder
from proto.model_runner_output import ModelRunnerOutput
from proto.sched_trace import Arrival, TraceHeader

MAX_BYTES: Final = 1 << 36
"""Of the file; it is the caller's disk."""
MAX_UNWRITTEN: Final = 1 << 30
"""A simulation waits for nobody, and nothing of it is to be missing."""


class FileTape:
    """A `Tracing` that writes to a file; raises ConfigError where there can be none.

    job_of: by handle. clock: the simulation's, from 0.
    """

    def __init__(
        self,
        path: str,
        header: TraceHeader,
        job_of: Callable[[int], str],
        clock: Callable[[], float],
    ) -> None:
        self._file = TraceFile(path, MAX_BYTES, MAX_UNWRITTEN)
        self._file.put(header)
        self._job_of = job_of
        seats = min(header.scheduler.max_num_seqs, header.scheduler.step_tokens)
        recorder = Recorder(self._put, started=0.0, num_seats=seats, clock=clock)
        self.scheduler_observer: SchedulerObserver = recorder
        self.pool_observers: Sequence[PoolObserver] = (recorder.census,)

    def close(self) -> None:
        self._file.close()

    def _put(self, line: msgspec.Struct) -> None:
        if isinstance(line, Arrival):
            line = msgspec.structs.replace(line, job=self._job_of(line.handle))
        self._file.put(line)


class Both:
    """Two observers of one scheduler."""

    def __init__(self, first: SchedulerObserver, second: SchedulerObserver) -> None:
        self._observers = (first, second)

    def watch(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None:
        for each in self._observers:
            each.watch(waiting, running, kv_cache)

    def added(self, request: Request) -> None:
        for each in self._observers:
            each.added(request)

    def step_begins(self, plan: StepPlan) -> None:
        for each in self._observers:
            each.step_begins(plan)

    def step_decided(self, step: int, plan: StepPlan) -> None:
        for each in self._observers:
            each.step_decided(step, plan)

    def found_elsewhere(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None:
        for each in self._observers:
            each.found_elsewhere(request, num_tokens, connector, is_async=is_async)

    def step_done(self, result: ModelRunnerOutput) -> None:
        for each in self._observers:
            each.step_done(result)

    def finished(self, request: Request) -> None:
        for each in self._observers:
            each.finished(request)

    def turn_ended(self, request_id: int, job: str, tool: str) -> None:
        for each in self._observers:
            each.turn_ended(request_id, job, tool)

    def pinned(self, pin: Pin, ttl: float) -> None:
        for each in self._observers:
            each.pinned(pin, ttl)

    def unpinned(self, pin: Pin, reason: str) -> None:
        for each in self._observers:
            each.unpinned(pin, reason)

    def happened(self, what: str, detail: str) -> None:
        for each in self._observers:
            each.happened(what, detail)
