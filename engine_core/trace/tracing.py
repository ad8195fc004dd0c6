"""Whether an engine is traced, and if so where its lines go.

Owns the recorder and its file; without `--sched-trace` there is neither.
"""

import time
from collections.abc import Sequence
from typing import Final, Protocol

from engine_core.kv_cache.events import PoolObserver
from engine_core.pool_plan import PoolPlan
from engine_core.scheduler.hooks import NO_OBSERVER, SchedulerObserver
from engine_core.trace.file import TraceFile, path_of_epoch
from engine_core.trace.recorder import Recorder
from proto.config import SchedulerConfig, TraceConfig
from proto.lifecycle import WorkerReady
from proto.sched_trace import TraceHeader


class Tracing(Protocol):
    """scheduler_observer, pool_observers: to be told by scheduler and block pool."""

    @property
    def scheduler_observer(self) -> SchedulerObserver:
        """Of the scheduler."""

    @property
    def pool_observers(self) -> Sequence[PoolObserver]:
        """Of the block pool."""

    def close(self) -> None:
        """Nothing happens any more."""


class NoTracing:
    """Nobody asked for a trace."""

    scheduler_observer: SchedulerObserver = NO_OBSERVER
    pool_observers: Sequence[PoolObserver] = ()

    def close(self) -> None:
        """Nothing."""


NO_TRACING: Final = NoTracing()


class FileTracing:
    """The trace of one engine, in a file that begins with `header`.

    Raises ConfigError where there can be no such file.
    """

    def __init__(self, path: str, max_bytes: int, header: TraceHeader, started: float) -> None:
        self._file = TraceFile(path, max_bytes)
        self._file.put(header)
        scheduler = header.scheduler
        seats = min(scheduler.max_num_seqs, scheduler.step_tokens)
        recorder = Recorder(self._file.put, started=started, num_seats=seats)
        self.scheduler_observer: SchedulerObserver = recorder
        self.pool_observers: Sequence[PoolObserver] = (recorder.census,)

    def close(self) -> None:
        self._file.close()


def start_tracing(
    config: TraceConfig,
    scheduler: SchedulerConfig,
    plan: PoolPlan,
    worker: WorkerReady,
    epoch: int,
    enable_prefix_caching: bool,
) -> Tracing:
    """What `--sched-trace` asks for; raises ConfigError for a file that cannot be written.

    scheduler: the settings as they came out. epoch: of the engine.
    """
    if config.sched_trace is None:
        return NO_TRACING
    header = TraceHeader(
        epoch=epoch,
        started_at=time.time(),
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        enable_prefix_caching=enable_prefix_caching,
        max_model_len=plan.max_model_len,
        scheduler=scheduler,
        groups=tuple(worker.geometry.groups),
        device=worker.device_name,
    )
    path = path_of_epoch(config.sched_trace, epoch)
    return FileTracing(path, config.sched_trace_max_bytes, header, time.monotonic())
