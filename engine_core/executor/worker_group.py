"""The workers of now, and those who take over when they die.

    hire ─▶ loading ─ WorkerReady of all ─▶ making caches ─ CacheReady of all ─▶ ready ─▶ steps
      ▲                                                                                    │
      └──────────────── workers of the next epoch: the old links close at once ◀───────────┘
                                      ▲
      distrust ── nobody to compute ──┘

Owns the executor of this epoch and the plan of the pool, which is made for the first
workers and holds for all that follow. Knows no requests.
"""

import logging
from collections.abc import Callable

from engine_core.executor.base import Executor, WorkerFailedError
from engine_core.pool_plan import PoolPlan
from proto.codec import Message
from proto.errors import ModelError
from proto.kv_connector import KVConnectorOutput
from proto.lifecycle import ProtocolViolation, WorkerReady, WorkersReady
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from proto.sockets import Link, Poller

# Between two sets of workers: the previous ones are no longer listened to.


class NoWorkers:
    """Never ready, so nobody hands it a step."""

    links: list[Link] = []
    workers: list[WorkerReady] = []
    cache_ready = False

    @property
    def num_steps(self) -> int:
        return 0

    @property
    def awaits(self) -> tuple[int, ...]:
        return ()

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """There is nobody to make one."""

    def submit(self, output: SchedulerOutput) -> None:
        """Only who is ready may be asked to."""
        raise AssertionError("a step for nobody")

    def submit_masks(self, masks: GrammarOutput) -> None:
        """They were for a step that is lost."""

    def receive(self) -> list[ModelRunnerOutput]:
        """Nothing."""
        return []

    def take_reports(self) -> list[KVConnectorOutput]:
        """Nothing."""
        return []

    def close(self) -> None:
        """There is nothing to close."""


logger = logging.getLogger("tokend.executor")


class WorkerGroup:
    """Runs steps on the workers of one epoch after the other.

    make_executor: reaches the workers of an epoch. make_plan: sizes the pool for them.
    poller: is told of their links. tell: sends the supervisor a message.
    """

    def __init__(
        self,
        make_executor: Callable[[int], Executor],
        make_plan: Callable[[list[WorkerReady]], PoolPlan],
        poller: Poller,
        tell: Callable[[Message], None],
        epoch: int,
    ) -> None:
        self._make_executor = make_executor
        self._make_plan = make_plan
        self._poller = poller
        self._tell = tell
        self._first: list[WorkerReady] = []
        self._plans: list[PoolPlan] = []
        self._executor: Executor = NoWorkers()
        self._num_reports = 0
        self._begin(epoch)

    @property
    def ready(self) -> bool:
        """The workers take steps."""
        return self._ready

    @property
    def epoch(self) -> int:
        """Of the workers of now."""
        return self._epoch

    @property
    def num_steps(self) -> int:
        """Steps that the workers of now have answered."""
        return self._executor.num_steps

    @property
    def awaits(self) -> tuple[int, ...]:
        """Ranks whose answer is missing: to a step, or to what comes before the first one."""
        return self._executor.awaits

    @property
    def num_reports(self) -> int:
        """What workers have said of copies so far, whichever epoch."""
        return self._num_reports

    @property
    def workers(self) -> list[WorkerReady]:
        """What the workers of now said of themselves; empty until all of them have loaded."""
        return self._executor.workers

    @property
    def plan(self) -> PoolPlan:
        """Of the pool; there is one once the first workers have loaded."""
        return self._plans[0]

    def connect_workers(self, epoch: int) -> None:
        """Workers of another epoch take over; nothing that the old ones say counts any more."""
        self._let_go()
        self._begin(epoch)

    def distrust(self, error: WorkerFailedError) -> None:
        """Hear nothing more of these workers, and have them ended; others are to be hired."""
        logger.error("%s", error)
        self._let_go()
        self._ready = False
        self._executor = NoWorkers()
        self._tell(ProtocolViolation("worker", error.rank, self._epoch, str(error)))

    def submit(self, output: SchedulerOutput) -> None:
        """Hand a step to the workers, which must be ready; never blocks."""
        self._executor.submit(output)

    def submit_masks(self, masks: GrammarOutput) -> None:
        """Hand over what a step waits for; never blocks."""
        self._executor.submit_masks(masks)

    def receive(self) -> list[ModelRunnerOutput]:
        """The steps that are complete on every rank, in order. What a start needs is done here.

        Raises WorkerFailedError when a worker sent nonsense, ModelError when the new
        workers are not what the old ones were.
        """
        results = self._executor.receive()
        if not self._ready:
            self._prepare()
        return results

    def take_reports(self) -> list[KVConnectorOutput]:
        """What workers have finished for the KV connector, told before the steps received."""
        reports = self._executor.take_reports()
        self._num_reports += len(reports)
        return reports

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._ready = self._initialized = False
        self._executor = self._make_executor(epoch)
        for link in self._executor.links:
            self._poller.add(link)

    def _let_go(self) -> None:
        for link in self._executor.links:
            self._poller.remove(link)
        self._executor.close()

    def _prepare(self) -> None:
        workers = self._executor.workers
        if workers and not self._initialized:
            if not self._first:
                self._first = workers
                self._plans.append(self._make_plan(workers))
            _check_same(self._first, workers)
            plan = self.plan
            self._executor.initialize_cache(plan.num_blocks, plan.block_size, plan.max_model_len)
            self._initialized = True
        if self._initialized and self._executor.cache_ready:
            self._ready = True
            self._tell(WorkersReady(self._epoch))


def _check_same(first: list[WorkerReady], workers: list[WorkerReady]) -> None:
    """KV of another shape or arithmetic fits neither the books nor the tokens there are."""
    for before, now in zip(first, workers, strict=True):
        for what in ("geometry", "vocab_size", "fingerprint"):
            if getattr(before, what) != getattr(now, what):
                raise ModelError(
                    f"worker {now.rank} came back with another {what.replace('_', ' ')}: "
                    "the model was changed while it was served"
                )
