"""Streaming input: a session's prompt arrives in parts, and each part starts a turn of output.

Token ids only; no endpoint uses sessions yet. Start reading at `generate`.

    inputs    [1 2 3] ───────────────▶ [4 5] ───────────────────▶ (no more)
    outputs            10 · 11 stop ·          20 · 21 stop ·            finished
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from api_server.engine.engine_client import EngineClient
from proto.engine_io import EngineCoreOutput, EngineCoreRequest, FinishReason, SessionInput
from proto.errors import InternalRequestError
from proto.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TurnInput:
    """The next part of a session's prompt.

    token_ids: [num_new_tokens], at least one. sampling_params: of the turn that follows.
    """

    token_ids: list[int]
    sampling_params: SamplingParams


@dataclass(frozen=True, slots=True)
class TurnOutput:
    """The output of one step.

    finish_reason: set at the end of a turn. finished: the session has ended.
    num_cached_tokens: of the turn's prompt; set in the turn's first output, else 0.
    """

    token_ids: list[int]
    finish_reason: FinishReason | None
    finished: bool
    num_cached_tokens: int = 0


async def generate(
    client: EngineClient, inputs: AsyncIterator[TurnInput], *, seed: int = 0
) -> AsyncIterator[TurnOutput]:
    """Run a session: send each input as soon as it arrives, also during a turn; yield the outputs.

    The session ends when `inputs` has ended and the last turn is finished. Closing this generator
    early, or an exception of `inputs` (which is raised here), aborts it. Raises RequestError if
    the engine refuses the session.
    """
    first = await anext(inputs)
    request = EngineCoreRequest(
        epoch=client.epoch,
        request_id=client.next_request_id(),
        prompt_token_ids=first.token_ids,
        sampling_params=first.sampling_params,
        seed=seed,
        arrival_time=time.monotonic(),
        resumable=True,
    )
    stream = SessionStream(request.request_id)
    client.submit(request, stream)
    sending = asyncio.create_task(_send_inputs(client, stream, inputs))
    try:
        finished = False
        while not finished:
            output = await stream.next_output()
            finished = output.finished
            yield output
    finally:
        sending.cancel()
        client.abort_request(stream)


async def _send_inputs(
    client: EngineClient, stream: "SessionStream", inputs: AsyncIterator[TurnInput]
) -> None:
    epoch, request_id = client.epoch, stream.request_id
    try:
        async for turn in inputs:
            client.send_input(SessionInput(epoch, request_id, turn.token_ids, turn.sampling_params))
        client.send_input(SessionInput(epoch, request_id, [], last=True))
    except Exception as error:
        stream.fail(error)
        client.abort_request(stream)


class SessionStream:
    """The outputs of one session, in a queue. An `OutputStream`."""

    num_choices = 1
    output_token_ids: tuple[tuple[int, ...], ...] = ()  # a session ends with its engine
    finished_choices: tuple[int, ...] = ()

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.finished = False
        self.ended_well = False
        self.error: Exception | None = None
        self._outputs: asyncio.Queue[TurnOutput | Exception] = asyncio.Queue()
        self._num_tokens = 0

    def accept(self) -> None:
        """Do nothing: the first output implies that the engine has accepted the session."""

    def called_tool(self) -> str:
        """Return "": a session has no text."""
        return ""

    def fail(self, error: Exception) -> None:
        """End the session with an error, unless it has ended."""
        if not self.finished:
            self.finished, self.error = True, error
            self._outputs.put_nowait(error)

    def process_output(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Queue one output; return False. Raises InternalRequestError when outputs were lost."""
        if output.error is not None:
            self.fail(output.error.to_exception())
        elif output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.fail(InternalRequestError("the session was ended by the server"))
        elif not self.finished:
            self._queue_output(output)
        return False

    async def next_output(self) -> TurnOutput:
        """Return the next output; raise the session's error if it has failed."""
        output = await self._outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    def _queue_output(self, output: EngineCoreOutput) -> None:
        if output.new_token_ids:
            if output.token_index != self._num_tokens:
                raise InternalRequestError("outputs of the engine were lost")
            self._num_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            self._num_tokens = 0
            self.finished = not output.goes_on
        first = output.first
        self._outputs.put_nowait(
            TurnOutput(
                output.new_token_ids,
                output.finish_reason,
                self.finished,
                0 if first is None else first.num_cached_tokens,
            )
        )
