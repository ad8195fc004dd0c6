"""Resumable sessions: requests whose input arrives in parts, one turn for each part.

Each turn is a Request of its own that inherits the blocks of the turn before. So workers receive a
new sequence, and a token that was in flight when a turn ended is ignored.

    open ─▶ turn ─▶ ended ─▶ idle ─▶ queued ─▶ turn …      at once if there is input already
                      │         │
                      ▼         ▼
                    closed    closed, aborted, idle for too long

An idle session has its place in the queue, as of the end of its last turn, and holds its blocks
until another request needs them (`WaitingBlockHolders`).
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final

import msgspec

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import SchedulerFeature
from engine_core.scheduler.preemption import WaitingBlockHolders
from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd, RequestLifecycle
from engine_core.validation import check_length
from proto.errors import ErrorInfo, InvalidRequestError
from proto.messages.engine_io import EngineCoreOutput, EventType, FinishReason, SessionInput

logger = logging.getLogger("tokend.sessions")

_TURN_ENDS: Final = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH,
    RequestStatus.FINISHED_REPETITION,
)
"""Statuses of a turn after which its session goes on."""


@dataclass(slots=True)
class _Session:
    """An open session.

    request: of the current turn or, between two turns, of the next one. inputs: of later turns;
    num_waiting: tokens in them. closed: no more input will arrive. finish_reason: of the last turn
    that ended.
    """

    request: Request
    inputs: deque[SessionInput] = field(default_factory=deque)
    num_waiting: int = 0
    closed: bool = False
    finish_reason: FinishReason = FinishReason.STOP


class ResumableSessions(SchedulerFeature):
    """Open resumable sessions by request id.

    max_model_len: maximum tokens of a session, over all turns. timeout: seconds that a session may
    rest.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_STREAMING_REQ

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        next_seq_id: Callable[[], int],
        kv_cache: KVCacheManager,
        waiting_block_holders: WaitingBlockHolders,
        *,
        max_model_len: int,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._lifecycle = lifecycle
        self._next_seq_id = next_seq_id
        self._waiting = lifecycle.waiting
        self._kv_cache = kv_cache
        self.waiting_block_holders = waiting_block_holders
        self._unblock = lifecycle.unblock
        self._max_model_len = max_model_len
        self._timeout = timeout
        self._clock = clock
        self._open: dict[int, _Session] = {}
        self._resting_since: dict[int, float] = {}
        self._ended: list[_Session] = []

    # Input

    def open_session(self, request: Request) -> None:
        """Open a session whose first turn is this request, which is about to be added."""
        self._open[request.request_id] = _Session(request)

    def accepts_input(self, front_end_index: int, request_id: int) -> bool:
        """Return whether this front end has an open session of this id."""
        session = self._open.get(request_id)
        return (
            session is not None
            and session.request.front_end_index == front_end_index
            and not session.closed
        )

    def add_input(self, message: SessionInput) -> list[EngineCoreOutput]:
        """Queue the input of a turn; return the final output if this ends the session.

        Raises InvalidRequestError for more tokens than the session can ever hold.
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
        return self._continue_session(session) if message.request_id in self._resting_since else []

    def fail_session(self, request_id: int, error: ErrorInfo) -> EngineCoreOutput:
        """End a session, also within a turn; return its final output."""
        self._lifecycle.abort_request(request_id)
        return EngineCoreOutput(request_id, 0, 0, [], FinishReason.ERROR, error=error)

    @property
    def seconds_to_next_end(self) -> float | None:
        """Seconds until a session has rested for too long; None while none rests."""
        for since in self._resting_since.values():
            return max(0.0, since + self._timeout - self._clock())
        return None

    def end_idle_sessions(self) -> OutputsByFrontEnd:
        """End the sessions that have rested for too long; return their final outputs."""
        outputs: OutputsByFrontEnd = {}
        while self._resting_since:
            request_id, since = next(iter(self._resting_since.items()))
            if self._clock() - since < self._timeout:
                break
            front_end = self._open[request_id].request.front_end_index
            message = f"no input came for {self._timeout:g} seconds (--session-timeout)"
            error = ErrorInfo("invalid_request", message)
            outputs.setdefault(front_end, []).append(self.fail_session(request_id, error))
        return outputs

    # Turns

    def on_ending(self, request: Request, *, succeeded: bool) -> None:
        """Give the blocks of a request that has ended to the next turn of its session, if any."""
        session = self._open.get(request.request_id)
        if session is None or request.status not in _TURN_ENDS:
            return
        if session.closed and not session.inputs:
            return
        following = request.next_turn(self._next_seq_id())
        goes_back = request.num_computed_tokens > following.num_tokens
        if not (goes_back and self._kv_cache.has_states):  # a state does not go back to a token
            following.num_computed_tokens = min(request.num_computed_tokens, following.num_tokens)
            self._kv_cache.hand_over_blocks(request, following, following.num_tokens)
        session.request, session.finish_reason = following, request.status.finish_reason
        self._ended.append(session)

    def begin_turns(self, outputs: OutputsByFrontEnd) -> None:
        """Begin the next turns of sessions whose turns have ended in a step, or let them rest.

        outputs: of the step; the final outputs of turns are marked, and the final outputs of
        sessions are appended.
        """
        ended, self._ended = self._ended, []
        for session in ended:
            front_end_outputs = outputs[session.request.front_end_index]
            _mark_turn(front_end_outputs, session.request.request_id)
            self._rest(session)
            front_end_outputs += self._continue_session(session)

    def _rest(self, session: _Session) -> None:
        request = session.request
        self._lifecycle.add_request(request)
        self._waiting.park_request(request)
        request.status = self.status
        self.waiting_block_holders.add_idle(request)
        self._resting_since[request.request_id] = self._clock()

    def _continue_session(self, session: _Session) -> list[EngineCoreOutput]:
        """Begin the next turn of an idle session, or end it if it is closed."""
        request_id = session.request.request_id
        if session.inputs:
            try:
                self._begin_turn(session)
            except InvalidRequestError as error:
                info = ErrorInfo("invalid_request", error.message, error.param)
                return [self.fail_session(request_id, info)]
        elif session.closed:
            self._lifecycle.abort_request(request_id)
            return [EngineCoreOutput(request_id, 0, 0, [], session.finish_reason)]
        return []

    def _begin_turn(self, session: _Session) -> None:
        request, message = session.request, session.inputs.popleft()
        params = message.sampling_params or request.sampling_params
        num_new = len(message.prompt_token_ids)
        check_length(request.num_tokens + num_new, params.max_tokens, self._max_model_len)
        session.num_waiting -= num_new
        request.append_input(message.prompt_token_ids, params)
        request.record_event(EventType.QUEUED, self._clock())
        del self._resting_since[request.request_id]
        self.waiting_block_holders.add_pending(request)
        self._unblock(request)

    # Blocks of sessions that rest

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self.waiting_block_holders.forget_request(request)

    def on_released(self, request: Request) -> None:
        """Close the session of a request, unless another turn follows."""
        self.waiting_block_holders.forget_request(request)
        session = self._open.get(request.request_id)
        if session is not None and session.request is request:
            del self._open[request.request_id]
            self._resting_since.pop(request.request_id, None)


def _mark_turn(outputs: list[EngineCoreOutput], request_id: int) -> None:
    """Mark the output that ends a turn: the session goes on."""
    for index, output in enumerate(outputs):
        if output.request_id == request_id:
            outputs[index] = msgspec.structs.replace(output, goes_on=True)
