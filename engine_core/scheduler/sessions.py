"""Sessions: requests whose input comes in parts, a turn for each part.

Owns the input that has not begun its turn, and the requests at rest: those that wait
for the input of their next turn. Every turn is a Request of its own, which inherits
the blocks of the turn before; so a worker is told of a new sequence, and a token that
was under way when a turn ended is nobody's.

    open ─▶ turn ─▶ ended ─▶ at rest ─▶ in line ─▶ turn …      input has come: at once
                      │         │
                      ▼         ▼
                    closed    closed, aborted, overdue

A session at rest has its place in the queue, as of the end of its last turn, and holds
its blocks until somebody lacks room (`NonRunningBlocks`).
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.hooks import Unblock
from engine_core.scheduler.preemption import NonRunningBlocks
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.result import ClientOutputs
from engine_core.validation import check_length
from proto.engine_io import EngineCoreOutput, FinishReason, SessionInput
from proto.errors import ErrorInfo, InvalidRequestError

if TYPE_CHECKING:
    from engine_core.scheduler.scheduler import Scheduler

logger = logging.getLogger("tokend.sessions")

_TURN_ENDS: Final = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH,
    RequestStatus.FINISHED_REPETITION,
)
"""A turn that ends otherwise ends its session."""


@dataclass(slots=True)
class _Session:
    """request: of the turn under way or, between two turns, of the next one.

    inputs: of turns to come; num_waiting: tokens in them. closed: no more will come.
    finish_reason: of the last turn that ended.
    """

    request: Request
    inputs: deque[SessionInput] = field(default_factory=deque)
    num_waiting: int = 0
    closed: bool = False
    finish_reason: FinishReason = FinishReason.STOP


class Sessions:
    """Open sessions by request id. A listener.

    non_running_blocks: those of sessions that do not run.
    max_model_len: usable length, in tokens, of all there is of a session.
    timeout: seconds that a session may be at rest.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_STREAMING_REQ

    def __init__(
        self,
        scheduler: "Scheduler",
        waiting: RequestQueue,
        kv_cache: KVCacheManager,
        non_running_blocks: NonRunningBlocks,
        *,
        max_model_len: int,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self._kv_cache = kv_cache
        self.non_running_blocks = non_running_blocks
        self._max_model_len = max_model_len
        self._timeout = timeout
        self._clock = clock
        self._open: dict[int, _Session] = {}
        self._resting_since: dict[int, float] = {}
        self._ended: list[_Session] = []

    # Input

    def open(self, request: Request) -> None:
        """A request that is about to be added is the first turn of a session."""
        self._open[request.request_id] = _Session(request)

    def takes_input(self, client_index: int, request_id: int) -> bool:
        """There is such a session of this front end, and it is not closed."""
        session = self._open.get(request_id)
        return (
            session is not None
            and session.request.client_index == client_index
            and not session.closed
        )

    def take(self, message: SessionInput) -> list[EngineCoreOutput]:
        """Input for a session that takes it; returns the output that ends the session, if it does.

        Raises InvalidRequestError for more than the session can ever hold.
        """
        session = self._open[message.request_id]
        request, num_new = session.request, len(message.prompt_token_ids)
        if num_new:
            params = message.sampling_params or request.sampling_params
            least = request.num_prompt_tokens + session.num_waiting + num_new
            check_length(least, params.max_tokens, self._max_model_len)
            session.inputs.append(message)
            session.num_waiting += num_new
        session.closed = message.last
        return self._go_on(session) if message.request_id in self._resting_since else []

    def fail(self, request_id: int, error: ErrorInfo) -> EngineCoreOutput:
        """End a session, whatever it is doing; returns its final output."""
        self._scheduler.abort(request_id)
        return EngineCoreOutput(request_id, 0, 0, [], FinishReason.ERROR, error=error)

    @property
    def seconds_to_next_end(self) -> float | None:
        """Until some session has been at rest for too long; None while none rests."""
        for since in self._resting_since.values():
            return max(0.0, since + self._timeout - self._clock())
        return None

    def end_overdue(self) -> ClientOutputs:
        """End those that have been at rest for too long."""
        outputs: ClientOutputs = {}
        while self._resting_since:
            request_id, since = next(iter(self._resting_since.items()))
            if self._clock() - since < self._timeout:
                break
            client = self._open[request_id].request.client_index
            message = f"no input came for {self._timeout:g} seconds (--session-timeout)"
            error = ErrorInfo("invalid_request", message)
            outputs.setdefault(client, []).append(self.fail(request_id, error))
        return outputs

    # Turns

    def end_turn(self, request: Request) -> None:
        """A request is over; if it is a turn and not the last, another inherits its blocks."""
        session = self._open.get(request.request_id)
        if session is None or request.status not in _TURN_ENDS:
            return
        if session.closed and not session.inputs:
            return
        following = request.next_turn(self._scheduler.next_seq_id())
        following.num_computed_tokens = min(request.num_computed_tokens, following.num_tokens)
        self._kv_cache.hand_over_blocks(request, following, following.num_tokens)
        session.request, session.finish_reason = following, request.status.finish_reason
        self._ended.append(session)

    def begin_turns(self, outputs: ClientOutputs) -> None:
        """After a step: sessions whose turns ended in it come to rest, or go on with their input.

        outputs: of the step; those of the turns that ended are marked, and what ends a
        session follows them.
        """
        ended, self._ended = self._ended, []
        for session in ended:
            client_outputs = outputs[session.request.client_index]
            _mark_turn(client_outputs, session.request.request_id)
            self._rest(session)
            client_outputs += self._go_on(session)

    def _rest(self, session: _Session) -> None:
        request = session.request
        self._scheduler.add_request(request)
        self._waiting.park(request)
        request.status = self.status
        self.non_running_blocks.add_resting(request)
        self._resting_since[request.request_id] = self._clock()

    def _go_on(self, session: _Session) -> list[EngineCoreOutput]:
        """A session at rest begins its next turn, ends for want of one, or rests on."""
        request_id = session.request.request_id
        if session.inputs:
            try:
                self._begin_turn(session)
            except InvalidRequestError as error:
                info = ErrorInfo("invalid_request", error.message, error.param)
                return [self.fail(request_id, info)]
        elif session.closed:
            self._scheduler.abort(request_id)
            return [EngineCoreOutput(request_id, 0, 0, [], session.finish_reason)]
        return []

    def _begin_turn(self, session: _Session) -> None:
        request, message = session.request, session.inputs.popleft()
        params = message.sampling_params or request.sampling_params
        num_new = len(message.prompt_token_ids)
        check_length(request.num_tokens + num_new, params.max_tokens, self._max_model_len)
        session.num_waiting -= num_new
        request.take_input(message.prompt_token_ids, params)
        request.queued_at = self._clock()
        del self._resting_since[request.request_id]
        self.non_running_blocks.move_to_queued(request)
        self._unblock(request)

    # As a listener

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self.non_running_blocks.forget(request)

    def on_released(self, request: Request) -> None:
        """The session is over with its request, unless that was a turn with another to follow."""
        self.non_running_blocks.forget(request)
        session = self._open.get(request.request_id)
        if session is not None and session.request is request:
            del self._open[request.request_id]
            self._resting_since.pop(request.request_id, None)


def _mark_turn(outputs: list[EngineCoreOutput], request_id: int) -> None:
    """The output that ends a turn says that the session goes on."""
    for index, output in enumerate(outputs):
        if output.request_id == request_id:
            outputs[index] = msgspec.structs.replace(output, goes_on=True)
