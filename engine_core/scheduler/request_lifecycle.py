"""How requests enter and leave the scheduler.

`RequestLifecycle` owns every unfinished request, from add_request to its final output. The
scheduler, the pass over a result and resumable sessions end requests here, so none of them needs
another. `completion` says whether a request has ended by its last token; front ends look for stop
strings.
"""

from collections.abc import Callable, Sequence

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import SchedulerFeature, SchedulerObserver
from engine_core.scheduler.output import OutputBuilder
from engine_core.scheduler.queues.base import RequestQueue
from proto.messages.engine_io import EngineCoreOutput, EventType
from proto.messages.sampling_params import MAX_REPEATED_TOKENS

OutputsByFrontEnd = dict[int, list[EngineCoreOutput]]
"""Outputs by index of the front end."""


def completion(request: Request, max_model_len: int) -> RequestStatus:
    """Return the status after the last output token: the present one, or a finished one.

    A stop token or repeated outputs count only after min_tokens; length always counts.
    """
    num_tokens = len(request.all_token_ids)
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens == 0:
        return request.status
    if (
        request.all_token_ids[-1] in request.stop_ids
        and num_output_tokens >= request.sampling_params.min_tokens
    ):
        return RequestStatus.FINISHED_STOPPED
    if num_output_tokens >= request.max_tokens or num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH
    if (
        request.repetition is not None
        and num_output_tokens >= request.sampling_params.min_tokens
        and request.repetition.is_found(_last_outputs(request, MAX_REPEATED_TOKENS))
    ):
        return RequestStatus.FINISHED_REPETITION
    return request.status


def _last_outputs(request: Request, limit: int) -> list[int]:
    return request.all_token_ids[max(request.num_prompt_tokens, request.num_tokens - limit) :]


def stop_token(request: Request) -> int | None:
    """Return the stop token that ended a stopped request.

    None for an end-of-sequence token, and for a pooled request.
    """
    if request.pooling_params is not None:
        return None
    params = request.sampling_params
    last = request.all_token_ids[-1]
    if last in params.eos_token_ids and not params.ignore_eos:
        return None
    return last


class RequestLifecycle:
    """All unfinished requests; adds them to the queue and ends them.

    waiting, running: the queue, and running requests in the order of admission.
    requests: by seq_id, in the order in which they were added.
    choices: by request id and number. Other parts only read these two.
    recently_ended: by seq_id, requests that steps in flight may still compute, with the last such
        step.
    """

    def __init__(
        self,
        waiting: RequestQueue,
        kv_cache: KVCacheManager,
        features: Sequence[SchedulerFeature],
        output_builder: OutputBuilder,
        observer: SchedulerObserver,
        clock: Callable[[], float],
        max_model_len: int,
    ) -> None:
        self.waiting = waiting
        self.running: list[Request] = []
        self.requests: dict[int, Request] = {}
        self.choices: dict[int, dict[int, Request]] = {}
        self.recently_ended: dict[int, tuple[Request, int]] = {}
        self._kv_cache = kv_cache
        self._features = features
        self._output_builder = output_builder
        self._observer = observer
        self._clock = clock
        self._max_model_len = max_model_len

    def add_request(self, request: Request) -> None:
        choices = self.choices.setdefault(request.request_id, {})
        assert request.choice not in choices, f"{request!r} is here already"
        choices[request.choice] = request
        self.requests[request.seq_id] = request
        request.max_tokens = min(
            request.max_tokens, self._max_model_len - request.num_prompt_tokens
        )
        request.record_event(EventType.QUEUED, self._clock())
        for feature in self._features:
            feature.on_request_added(request)
        self.waiting.add_request(request)
        self._observer.on_request_added(request)

    def unblock(self, request: Request) -> None:
        """Make a parked request ready again, in its old place in the queue; ignores any other."""
        if request.status.is_blocked:
            preempted = request.num_preemptions > 0
            request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
            self.waiting.unpark_request(request)

    def abort_request(
        self, request_id: int, choice: int | None = None, *, stopped: bool = False
    ) -> int:
        """End a request, or one choice of it, without another output; see `Scheduler`."""
        ended = [
            request
            for number, request in self.choices.get(request_id, {}).items()
            if choice is None or number == choice or request.sampling_params.beam_width
        ]
        self.abort_requests(ended, stopped=stopped)
        return len(ended)

    def abort_requests(self, requests: Sequence[Request], *, stopped: bool = False) -> None:
        """End requests in any status. stopped: their clients have received all they want."""
        for request in requests:
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove_request(request)
            request.status = RequestStatus.FINISHED_ABORTED
            self._release(request, succeeded=stopped)
        self.clear_running()

    def finish_request(self, request: Request, status: RequestStatus) -> None:
        """End a request with this status; the caller calls `clear_running` later."""
        if request.status is not RequestStatus.RUNNING:
            self.waiting.remove_request(request)
        if status is RequestStatus.FINISHED_STOPPED:
            request.stop_reason = stop_token(request)
        request.status = status
        self._release(request, succeeded=status is not RequestStatus.FINISHED_ERROR)

    def allow_cached_prompt(self, request: Request) -> None:
        """Let all choices find their prompt in the cache, since one of them has computed it."""
        for choice in self.choices[request.request_id].values():
            choice.skip_reading_prefix_cache = False

    def clear_running(self) -> None:
        """Remove requests that have ended from the running list."""
        self.running[:] = [request for request in self.running if not request.is_finished]

    def forget_ended(self, step: int) -> None:
        """Forget ended requests that no step after this one computes."""
        for seq_id, (_, last_step) in list(self.recently_ended.items()):
            if last_step > step:
                return
            del self.recently_ended[seq_id]

    def _release(self, request: Request, *, succeeded: bool) -> None:
        for feature in reversed(self._features):
            feature.on_ending(request, succeeded=succeeded)
        self._kv_cache.free(request)
        self._observer.on_request_finished(request)
        if request.scheduled_at is not None:
            self.recently_ended[request.seq_id] = (request, self._output_builder.step)
        self._output_builder.finish_sequence(request.seq_id)
        for feature in self._features:
            feature.on_released(request)
        del self.requests[request.seq_id]
        choices = self.choices[request.request_id]
        del choices[request.choice]
        if not choices:
            del self.choices[request.request_id]
