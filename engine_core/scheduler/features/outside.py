"""What a scheduler feature from outside extends: an interpreted class, unlike the features here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine_core.request import Request, RequestStatus
from proto.settings.config import SchedulerConfig

if TYPE_CHECKING:
    from engine_core.kv_cache.manager import KVCacheManager
    from engine_core.scheduler.features.base import Candidate
    from engine_core.scheduler.step_plan import StepPlan


@dataclass(frozen=True)
class FeatureContext:
    """What a feature may use.

    unblock: makes a request that it held back ready again; engine thread only. clock: seconds, as
    in `Request.arrival_time`. kv_cache: to look at.
    """

    config: SchedulerConfig
    kv_cache: "KVCacheManager"
    unblock: Callable[[Request], None]
    clock: Callable[[], float]


class OutsideFeature:
    """Takes part in the life of requests where it replaces a method: see `SchedulerFeature`.

    Constructed with a FeatureContext. Asked before grammars, prefixes and the KV connector.
    status: of the requests that it holds back.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_FEATURE

    def __init__(self, context: FeatureContext) -> None:
        self.context = context

    def on_request_added(self, request: Request) -> None:
        """A request is about to be queued."""

    def begin_admission(self, plan: "StepPlan") -> None:
        """Prepare for the admissions of this step."""

    def is_blocked(self, candidate: "Candidate") -> bool:
        """Return whether the request at the head of the queue waits until `context.unblock`."""
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """A request was given blocks; this step computes `num_new_tokens` of its tokens."""

    def on_ending(self, request: Request, *, succeeded: bool) -> None:
        """A request, which still has its blocks, ends with the status that says how."""

    def on_released(self, request: Request) -> None:
        """A request has ended, from any status, and its blocks are freed."""
