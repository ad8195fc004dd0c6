"""A session of /v1/sessions: a completion whose prompt arrives in parts, with a turn for each part.

    client ── input ──▶ Session.add_turn ──────────────▶ EngineClient ──▶ engine
    client ◀── chunk ── Session.send_chunks ◀── Turn ◀── Session.process_output ◀── EngineClient

The engine has one resumable request for the session (`proto/messages/engine_io.py`). Each turn is a
`TokenStream` with one prompt, so its text, figures and log line are those of a completion.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from api_server.engine.engine_client import EngineClient
from api_server.errors import DrainingError
from api_server.generation.encoders.base import event_data
from api_server.generation.encoders.completions import CompletionEncoder
from api_server.generation.request_stream import RequestStream, StreamNotifier
from api_server.generation.response import event_text
from api_server.generation.stream import TokenStream
from proto.codec import changed
from proto.errors import (
    InternalRequestError,
    InvalidRequestError,
    OverloadedError,
    RequestAbortedError,
    RequestError,
)
from proto.messages.engine_io import EngineCoreOutput, EngineCoreRequest, FinishReason, SessionInput
from proto.messages.sampling_params import SamplingParams

logger = logging.getLogger("tokend.api")

MAX_WAITING_TURNS: Final = 64
"""Most inputs whose turns have not finished."""

SendText = Callable[[str], Awaitable[None]]
"""Sends one message to the client; suspends while the client does not read."""


@dataclass(slots=True, eq=False)
class Turn:
    """One turn. token_ids: of its input."""

    stream: TokenStream
    encoder: CompletionEncoder
    token_ids: list[int]

    @property
    def output(self) -> RequestStream:
        return self.stream.streams[0]


class Session:
    """A session between a client and the engine. An `OutputStream`.

    finished: no more output will come. error: why the session failed; None if it did not.
    """

    num_choices = 1
    output_token_ids: tuple[tuple[int, ...], ...] = ()  # a session ends with its engine
    finished_choices: tuple[int, ...] = ()

    def __init__(self, client: EngineClient, open_streams: set[TokenStream]) -> None:
        self.request_id = client.next_request_id()
        self.notifier = StreamNotifier()
        self.finished = False
        self.error: RequestError | None = None
        self._client = client
        self._open_streams = open_streams
        self._turns: deque[Turn] = deque()
        self._context: list[int] = []
        self._engine = 0
        self._unsent: list[SessionInput] = []
        self._is_open = self._is_accepted = self._input_ended = False

    # Input

    @property
    def is_open(self) -> bool:
        """The session has had an input."""
        return self._is_open

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far, with inputs that wait; their outputs do not count."""
        waiting = sum(len(turn.token_ids) for turn in self._turns if not turn.stream.finished)
        return len(self._context) + waiting

    def check_takes_input(self) -> None:
        """Raise a RequestError if the session takes no more input."""
        if isinstance(self.error, DrainingError):
            raise self.error
        if self._input_ended or self.finished:
            raise InvalidRequestError("the session takes no input after its end", "type")
        if len(self._turns) >= MAX_WAITING_TURNS:
            raise InvalidRequestError(
                f"at most {MAX_WAITING_TURNS} inputs may wait: send fewer ahead", "prompt"
            )

    def add_turn(self, turn: Turn, params: SamplingParams) -> None:
        """Send the input of a turn to the engine; raise RequestError if that is not possible."""
        self.check_takes_input()
        if self._is_open:
            self._send_input(SessionInput(0, self.request_id, turn.token_ids, params))
        else:
            request = self._request(turn.stream.requests[0], params)
            self._client.submit(request, self, turn.stream.engine)
            self._is_open = True
        self._turns.append(turn)
        self._open_streams.add(turn.stream)
        if len(self._turns) == 1:
            self._begin_turn(turn)

    def end_input(self) -> None:
        """End the session after the turns that wait."""
        if self._input_ended or self.finished:
            return
        self._input_ended = True
        if self._is_open:
            self._send_input(SessionInput(0, self.request_id, [], last=True))
        else:
            self._finish()

    def drain(self) -> None:
        """End the session after the turns that wait, and report that the server drains."""
        if not self.finished:
            self.end_input()
            self.error = self.error or DrainingError()
            self.notifier.notify()

    def close(self, *, disconnected: bool = False) -> None:
        """Abort what has not finished. disconnected: because the client has."""
        self._client.abort_request(self)
        self.finished = True
        for turn in self._turns:
            if disconnected:
                turn.stream.disconnect("disconnect")
            turn.stream.close()
        self._turns.clear()

    # Output, as an `OutputStream`

    @property
    def ended_well(self) -> bool:
        return self.error is None

    def note_engine(self, index: int) -> None:
        self._engine = index

    def accept(self) -> None:
        """Note that the engine has the session; send the inputs that arrived before."""
        self._is_accepted = True
        if self._turns:
            self._turns[0].output.accept()
        unsent, self._unsent = self._unsent, []
        try:
            for message in unsent:
                self._client.send_input(message)
        except OverloadedError as error:
            self.fail(error)
            self._client.abort_request(self)

    def called_tool(self) -> str:
        """Return "": sessions have no tools."""
        return ""

    def fail(self, error: RequestError) -> None:
        if not self.finished:
            self.error = error
            for turn in self._turns:
                turn.stream.fail(error)
            self._finish()

    def process_output(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Pass an output to its turn; return False. Raises as `RequestStream.process_output`."""
        turn = self._running_turn()
        if turn is None:
            self._finish_between_turns(output)
            return False
        turn.output.process_output(output, timestamp)
        if turn.output.error is not None:
            self.fail(turn.output.error)
        elif turn.output.finished:
            # The last token was sampled and never computed: the next prompt does not contain it.
            self._context = [*turn.output.prompt_token_ids, *turn.output.choices[0].token_ids[:-1]]
            following = self._running_turn()
            if not output.goes_on:
                self._finish()
            elif following is not None:
                self._begin_turn(following)
        return False

    async def send_chunks(self, send: SendText) -> None:
        """Send the chunks of all turns in order, until the session has finished."""
        while True:
            while self._turns and await self._send_turn(self._turns[0], send):
                self._turns.popleft().stream.close()
            if self.finished:
                return
            await self.notifier.wait()

    async def _send_turn(self, turn: Turn, send: SendText) -> bool:
        """Send what is new in a turn; return whether the turn has ended."""
        stream, encoder = turn.stream, turn.encoder
        try:
            events = [encoder.encode_delta(delta) for delta in stream.pop_deltas()]
            if stream.finished and stream.error is None:
                events.append(encoder.encode_end(stream.usage()))
        except Exception:
            logger.exception("%s: a turn could not be encoded", stream.label)
            stream.fail(InternalRequestError("internal error"))
            events = []
        has_ended = stream.finished
        if stream.error is not None and not self.finished:  # of the encoder or of an operator
            self.fail(stream.error)
            self._client.abort_request(self)
        messages = event_data(await event_text(events))
        stream.send_buffer.is_blocked = True  # visible to others only if `send` suspends
        for message in messages:
            await send(message)
        stream.send_buffer.is_blocked = False
        return has_ended

    def _request(self, first: EngineCoreRequest, params: SamplingParams) -> EngineCoreRequest:
        """Return the engine request of the session, made from that of its first turn."""
        return changed(
            first,
            request_id=self.request_id,
            sampling_params=params,
            resumable=True,
            queue_deadline=float("inf"),
            deadline=float("inf"),
        )

    def _send_input(self, message: SessionInput) -> None:
        if self._is_accepted:
            self._client.send_input(message)
        else:  # the engine would not know the session yet
            self._unsent.append(message)

    def _begin_turn(self, turn: Turn) -> None:
        """Note the whole prompt of a turn, now that all turns before it have finished."""
        turn.output.note_engine(self._engine)
        turn.output.prompt_token_ids = [*self._context, *turn.token_ids]
        if self._is_accepted:
            turn.output.accept()

    def _running_turn(self) -> Turn | None:
        for turn in self._turns:
            if not turn.stream.finished:
                return turn
        return None

    def _finish_between_turns(self, output: EngineCoreOutput) -> None:
        if output.error is not None:
            self.fail(output.error.to_exception())
        elif output.finish_reason is FinishReason.ABORT:
            self.fail(RequestAbortedError())
        elif output.finish_reason is FinishReason.ERROR:
            self.fail(InternalRequestError("the session was ended by the server"))
        elif output.finish_reason is not None:
            self._finish()

    def _finish(self) -> None:
        self.finished = True
        self.notifier.notify()
