"""Who may watch the scheduler: what arrives, what each step decides and brings, what ends.

Owns nothing. An observer looks and changes nothing; it is called in the step, so it is quick.
Without one the scheduler calls a null object, three times a step.
"""

from collections.abc import Collection
from typing import Final, Protocol

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.queues.base import RequestQueue
from engine_core.request import Request
from engine_core.scheduler.pin_order import Pin
from engine_core.scheduler.step_plan import StepPlan
from proto.model_runner_output import ModelRunnerOutput


class SchedulerObserver(Protocol):
    """Told by one scheduler, in the order in which things happen."""

    def watch(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None:
        """What it may look at from now on; called once, before anything else."""
        ...

    def added(self, request: Request) -> None:
        """It is in the queue."""
        ...

    def step_begins(self, plan: StepPlan) -> None:
        """Nothing of this step is decided."""
        ...

    def step_decided(self, step: int, plan: StepPlan) -> None:
        """All of it is; the counters of its requests are those of before the step."""
        ...

    def found_elsewhere(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None:
        """A connector brings tokens of it: asynchronously, or with its first step, this one."""
        ...

    def step_done(self, result: ModelRunnerOutput) -> None:
        """A result has come and is about to be taken in."""
        ...

    def finished(self, request: Request) -> None:
        """It is over, with the status that says how, and has no blocks any more."""
        ...

    def turn_ended(self, request_id: int, job: str, tool: str) -> None:
        """A front end says what the job waits for."""
        ...

    def pinned(self, pin: Pin, ttl: float) -> None:
        """A job keeps blocks for so many seconds after its turn; told again when that changes."""
        ...

    def unpinned(self, pin: Pin, reason: str) -> None:
        """It has given them up."""
        ...

    def happened(self, what: str, detail: str) -> None:
        """Anything else that changes decisions."""
        ...


class NoObserver:
    """Nobody watches."""

    def watch(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None: ...

    def added(self, request: Request) -> None: ...

    def step_begins(self, plan: StepPlan) -> None: ...

    def step_decided(self, step: int, plan: StepPlan) -> None: ...

    def found_elsewhere(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None: ...

    def step_done(self, result: ModelRunnerOutput) -> None: ...

    def finished(self, request: Request) -> None: ...

    def turn_ended(self, request_id: int, job: str, tool: str) -> None: ...

    def pinned(self, pin: Pin, ttl: float) -> None: ...

    def unpinned(self, pin: Pin, reason: str) -> None: ...

    def happened(self, what: str, detail: str) -> None: ...


NO_OBSERVER: Final = NoObserver()
