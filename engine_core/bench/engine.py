"""The engine of a workload: wired as in the daemon, its messages kept instead of sent."""

import tempfile
from pathlib import Path

import msgspec

from engine_core.bench.fake_worker import GEOMETRY, NUM_TOKEN_IDS
from engine_core.bench.recipes import EPOCH, requests_of
from engine_core.core import build_parts, scheduler_settings
from engine_core.kv_events import NoKVEvents
from engine_core.pool_plan import PoolPlan, plan_pool
from engine_core.trace.tracing import NO_TRACING, Tracing, start_tracing
from engine_core.transport import FrontEndLinks
from engine_core.view.views import EngineViews
from proto import PROTOCOL_VERSION
from proto.benchmark import SchedulerWorkload
from proto.config import CacheConfig, SchedulerConfig, ServeConfig, TraceConfig
from proto.config_checks import validate
from proto.engine_io import EngineCoreOutputs
from proto.heap import settle_heap
from proto.lifecycle import WorkerReady

_FINGERPRINT = bytes(32)
_CLIENT = 0


class KeptMessages(FrontEndLinks):
    """Stands where the links to the front ends do; `last` is what was sent last."""

    def __init__(self) -> None:
        super().__init__("", EPOCH, ())
        self.last = EngineCoreOutputs(EPOCH, 0, 0.0)

    @property
    def alive(self) -> list[int]:
        return [_CLIENT]

    def send(self, client: int, message: msgspec.Struct) -> None:
        assert isinstance(message, EngineCoreOutputs)
        self.last = message


class BenchEngine:
    """The parts of an engine and the requests of a workload.

    Every setting that the workload does not name has its default, but any number may wait.
    views: of the live view, if anybody watches.
    """

    def __init__(self, workload: SchedulerWorkload) -> None:
        """Raises ConfigError for a workload whose settings are impossible or not available."""
        config = ServeConfig(
            cache=CacheConfig(
                block_size=workload.block_size, num_gpu_blocks_override=workload.num_blocks
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=workload.max_num_seqs,
                max_num_batched_tokens=workload.max_num_batched_tokens,
                scheduling_policy=workload.scheduling_policy,
                max_num_queued_reqs=0,
                max_num_queued_tokens=0,
            ),
        )
        validate(config)
        worker = WorkerReady(
            PROTOCOL_VERSION, EPOCH, 0, GEOMETRY, 0, NUM_TOKEN_IDS, _FINGERPRINT, "none"
        )
        plan = plan_pool([worker], config, workload.max_model_len)
        self.sent = KeptMessages()
        tracing = _tracing(config, plan, worker) if workload.traced else NO_TRACING
        self.parts = build_parts(
            config, plan, worker, self.sent, EPOCH, NoKVEvents(), tracing=tracing
        )
        self.views: list[EngineViews] = []
        if workload.watched:
            assert isinstance(self.parts.views, EngineViews), "the page is on by default"
            self.parts.views.watch(_CLIENT, wanted=True)
            self.views.append(self.parts.views)
        settle_heap()
        self._requests = requests_of(workload)
        self._concurrency = workload.concurrency

    def offer(self) -> None:
        """Take requests in until as many are unfinished as the workload asks for."""
        scheduler, intake = self.parts.scheduler, self.parts.intake
        while scheduler.num_unfinished < self._concurrency:
            before = scheduler.num_unfinished
            intake.take(_CLIENT, next(self._requests))
            assert scheduler.num_unfinished > before, "the engine refused a request"
        self.parts.outbox.flush()


def _tracing(config: ServeConfig, plan: PoolPlan, worker: WorkerReady) -> Tracing:
    """Into a file that nobody will read: its name is gone at once."""
    scheduler = scheduler_settings(config, worker)
    with tempfile.TemporaryDirectory() as folder:
        trace = TraceConfig(sched_trace=str(Path(folder) / "trace.jsonl"))
        return start_tracing(trace, scheduler, plan, worker, EPOCH, True)
