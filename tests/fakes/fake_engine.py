"""The peers of a front end: an engine that a test controls, behind a real link, and a supervisor.

The engine runs on the test's event loop. With a `script` it generates by itself, one token in each
message; without one the test calls `accept`, `emit` and `refuse`.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from api_server.engine.async_link import SupervisorLink
from proto import PROTOCOL_VERSION, codec
from proto.errors import ErrorInfo
from proto.messages.engine_io import (
    Abort,
    AdminCall,
    AdminReply,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsArrays,
    PauseMode,
    RequestProgress,
    SessionInput,
    ToEngine,
    TurnEnded,
)
from proto.messages.lora import (
    AdapterCall,
    AdapterCard,
    AdapterList,
    AdapterReply,
    AdapterUsage,
    LoRARequest,
)
from proto.messages.stats import SchedulerStats
from proto.messages.view import EngineView, Watch
from proto.runtime.sockets import Link
from tests.fakes import lifecycle_messages
from tests.fakes.events import first_events

Message = TypeVar("Message")

WAIT_SECONDS: Final = 60.0

Script = Callable[[EngineCoreRequest, int], Sequence[int]]
"""Maps (request, choice) to the tokens that the model samples; their end is the length limit."""


def pack_logprobs(
    rows: Sequence[Sequence[tuple[int, float]]], ranks: Sequence[int], first_position: int = 0
) -> LogprobsArrays:
    """Pack rows of (token id, logprob), the chosen token first, as the worker does."""
    ids = np.array([[token for token, _ in row] for row in rows], dtype="<i4")
    values = np.array([[value for _, value in row] for row in rows], dtype="<f4")
    return LogprobsArrays(
        first_position,
        ids.shape[1],
        ids.tobytes(),
        values.tobytes(),
        np.array(ranks, dtype="<i4").tobytes(),
    )


def fake_logprobs(token_ids: Sequence[int], number: int, first: int = 0) -> LogprobsArrays:
    """Return logprobs: the chosen token at -0.5, its alternatives are itself and its neighbours."""
    rows = [
        [(token, -0.5), *((token + step, -0.5 - step) for step in range(number))]
        for token in token_ids
    ]
    return pack_logprobs(rows, [1] * len(rows), first)


class Received(asyncio.Queue[Message]):
    """Messages of a front end; waiting for a message that never arrives is an error."""

    async def get(self) -> Message:
        """Return the next message; raise TimeoutError after WAIT_SECONDS."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await super().get()


class FakeEngine:
    """The engine's end of a link to a front end.

    requests, inputs, aborts, turns, watches: queues of received messages. calls: received admin
    calls. resets: whether the prefix cache can be reset. accepts: whether every request is
    accepted immediately, with or without a script. adapters: by name. adapter_calls: received;
    answers_adapter_calls: whether they are carried out.
    """

    def __init__(
        self,
        path: str,
        *,
        vocab_size: int,
        max_model_len: int = 256,
        epoch: int = 1,
        script: Script | None = None,
        accepts: bool = False,
    ) -> None:
        self.link = Link.bind(path, ToEngine)
        self.epoch = epoch
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.script = script
        self.accepts = accepts
        self.requests = Received[EngineCoreRequest]()
        self.inputs = Received[SessionInput]()
        self.aborts = Received[Abort]()
        self.turns = Received[TurnEnded]()
        self.watches = Received[Watch]()
        self.calls: list[AdminCall] = []
        self.adapters: dict[str, AdapterCard] = {}
        self.adapter_calls: list[AdapterCall] = []
        self.answers_adapter_calls = True
        self.num_cached_tokens = 0
        self.resets = True
        self.pause_mode: PauseMode | None = None
        self._aborted: set[tuple[int, int | None]] = set()
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._begun: set[tuple[int, int]] = set()
        self._closed = False
        self._steps = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.link.fileno(), self._drain)
        self._drain()

    def announce(self, protocol_version: int = PROTOCOL_VERSION) -> None:
        """Send EngineReady: the engine accepts requests."""
        self._send(
            lifecycle_messages.engine_ready(
                protocol_version=protocol_version,
                epoch=self.epoch,
                max_model_len=self.max_model_len,
                vocab_size=self.vocab_size,
            )
        )

    def accept(self, request: EngineCoreRequest) -> None:
        self._send(self._outputs([], accepted=[request.request_id]))

    def send_running_alone(self, request: EngineCoreRequest) -> None:
        """Report that this is the only running request."""
        self._send(
            EngineCoreOutputs(
                self.epoch,
                next(self._steps),
                time.monotonic(),
                [],
                alone=[request.request_id],
                progress=[RequestProgress(request.request_id, 0, 0)],
            )
        )

    def send_progress(self, request: EngineCoreRequest, computed: int, under_way: int) -> None:
        """Report the progress of a request before a step."""
        progress = [RequestProgress(request.request_id, computed, under_way)]
        self._send(
            EngineCoreOutputs(
                self.epoch, next(self._steps), time.monotonic(), [], progress=progress
            )
        )

    def refuse(self, request: EngineCoreRequest, error: ErrorInfo) -> None:
        self.send_outputs(EngineCoreOutput(request.request_id, 0, 0, [], error=error))

    def emit(
        self,
        request: EngineCoreRequest,
        token_ids: Sequence[int],
        *,
        choice: int = 0,
        finish: FinishReason | None = None,
        **fields: Any,
    ) -> None:
        """Send new tokens of a choice, with made-up log-probabilities if requested."""
        output = self.output(request, token_ids, choice=choice, finish=finish, **fields)
        self.send_outputs(output)

    def output(
        self,
        request: EngineCoreRequest,
        token_ids: Sequence[int],
        *,
        choice: int = 0,
        finish: FinishReason | None = None,
        **fields: Any,
    ) -> EngineCoreOutput:
        key = (request.request_id, choice)
        index = self._sent[key]
        self._sent[key] = 0 if fields.get("goes_on") else index + len(token_ids)
        params = request.sampling_params
        if key not in self._begun:
            self._begun.add(key)
            now = time.monotonic()
            fields.setdefault("events", first_events(self.num_cached_tokens, now, now))
            if params.prompt_logprobs is not None and choice == 0:
                fields.setdefault(
                    "prompt_logprobs",
                    fake_logprobs(request.prompt_token_ids[1:], params.prompt_logprobs, 1)
                    if len(request.prompt_token_ids) > 1
                    else None,
                )
        if params.logprobs is not None and token_ids:
            fields.setdefault("logprobs", fake_logprobs(token_ids, params.logprobs, index))
        return EngineCoreOutput(
            request.request_id, choice, index, list(token_ids), finish, **fields
        )

    def send_outputs(self, *outputs: EngineCoreOutput, stats: SchedulerStats | None = None) -> None:
        """Send outputs unchanged, in one message."""
        self._send(self._outputs(list(outputs), stats=stats))

    def send_view(self, view: EngineView) -> None:
        """Send a live view of this engine, with or without subscribers."""
        self._send(view)

    def is_aborted(self, request_id: int, choice: int) -> bool:
        return (request_id, None) in self._aborted or (request_id, choice) in self._aborted

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._closed = True
        self._loop.remove_reader(self.link.fileno())
        self.link.close()

    def _outputs(
        self,
        outputs: list[EngineCoreOutput],
        accepted: list[int] | None = None,
        stats: SchedulerStats | None = None,
    ) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            self.epoch, next(self._steps), time.monotonic(), outputs, accepted or [], stats
        )

    def _send(self, message: Any) -> None:
        self.link.send(message)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._closed:
            return
        if not self.link.flush():  # before receiving: a send may consume the event
            self._loop.call_later(0.01, self._drain)
        for message in self.link.receive():
            if isinstance(message, EngineCoreRequest):
                self._on_request(message)
            elif isinstance(message, SessionInput):
                self.inputs.put_nowait(message)
            elif isinstance(message, Abort):
                self._aborted.add((message.request_id, message.choice))
                self.aborts.put_nowait(message)
            elif isinstance(message, TurnEnded):
                self.turns.put_nowait(message)
            elif isinstance(message, Watch):
                self.watches.put_nowait(message)
            elif isinstance(message, AdapterCall):
                self.adapter_calls.append(message)
                if self.answers_adapter_calls:
                    self.answer_adapter_call(message)
            elif isinstance(message, AdminCall):
                self.calls.append(message)
                self._send(self._reply(message))

    def send_adapters(self, *adapters: AdapterCard) -> None:
        """Send the list of these adapters, as after their loads."""
        self.adapters = {card.lora.lora_name: card for card in adapters}
        self._send(AdapterList(self.epoch, list(adapters)))

    def change_adapters(self, *adapters: AdapterCard, removed: Sequence[str] = ()) -> None:
        """Send what has changed, as after a load or an unload."""
        message = AdapterList(self.epoch, list(adapters), is_change=True, removed=list(removed))
        message.apply_to(self.adapters)
        self._send(message)

    def answer_adapter_call(self, call: AdapterCall) -> None:
        """Carry out a call as an engine does whose workers can load everything."""
        status, text = 200, f"Success: LoRA adapter '{call.lora_name}' "
        cards = dict(self.adapters)
        if call.action == "load" and call.lora_name in cards and not call.load_inplace:
            status, text = 400, f"The lora adapter '{call.lora_name}' has already been loaded."
        elif call.action == "load":
            lora = LoRARequest(len(cards) + 1, call.lora_name, call.path, bytes(32))
            cards[call.lora_name] = AdapterCard(lora, 8, 1000, len(cards))
            text += "added successfully."
        elif call.action == "unload" and cards.pop(call.lora_name, None) is None:
            status, text = 404, f"The lora adapter '{call.lora_name}' cannot be found."
        elif call.action == "unload":
            text += "removed successfully."
        else:
            for name, card in cards.items():
                scale = call.scale if name == call.lora_name else 0.0
                cards[name] = codec.changed(card, default_scale=scale)
        self.send_adapters(*cards.values())
        self._send(AdapterReply(call.epoch, call.call_id, status, text))

    def send_adapter_usage(self, usage: AdapterUsage) -> None:
        self._send(usage)

    def _reply(self, call: AdminCall) -> AdminReply:
        if call.name in ("pause", "resume"):
            self.pause_mode = call.pause_mode if call.name == "pause" else None
        if call.name == "get_pause":
            paused = int(self.pause_mode is not None)
            return AdminReply(call.epoch, call.call_id, True, self.pause_mode or "", paused)
        if call.name == "reset_prefix_cache" and not call.reset_running_requests:
            detail = "" if self.resets else "3 requests are unfinished"
            return AdminReply(call.epoch, call.call_id, self.resets, detail)
        return AdminReply(call.epoch, call.call_id, True, call.name)

    def _on_request(self, request: EngineCoreRequest) -> None:
        for choice, tokens in enumerate(request.output_token_ids):
            self._sent[request.request_id, choice] = len(tokens)
        self.requests.put_nowait(request)
        if self.accepts or self.script is not None:
            self.accept(request)
        if self.script is not None:
            task = asyncio.create_task(self._generate(request, self.script))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _generate(self, request: EngineCoreRequest, script: Script) -> None:
        params = request.sampling_params
        texts = [list(script(request, choice)) for choice in range(request.n)]
        for step in range(params.max_tokens):
            running = [
                choice
                for choice, tokens in enumerate(texts)
                if step < len(tokens) and not self.is_aborted(request.request_id, choice)
            ]
            if not running:
                return
            outputs = []
            for choice in running:
                token = texts[choice][step]
                last = step + 1 == min(len(texts[choice]), params.max_tokens)
                finish, reason = self._ending(request, token, step, last)
                if finish is not None:
                    texts[choice] = texts[choice][: step + 1]
                outputs.append(
                    self.output(request, [token], choice=choice, finish=finish, stop_reason=reason)
                )
            self.send_outputs(*outputs)
            await asyncio.sleep(0)

    @staticmethod
    def _ending(
        request: EngineCoreRequest, token: int, step: int, last: bool
    ) -> tuple[FinishReason | None, int | None]:
        params = request.sampling_params
        if token in params.stop_ids and step + 1 >= params.min_tokens:
            is_eos = token in params.eos_token_ids and not params.ignore_eos
            return FinishReason.STOP, None if is_eos else token
        if last:
            return FinishReason.LENGTH, None
        return None, None


class FakeSupervisor(SupervisorLink):
    """Records what a front end sends, in `sent`, and sends no commands."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.sent: asyncio.Queue[codec.Message] = asyncio.Queue()

    def send(self, message: codec.Message) -> None:
        self.sent.put_nowait(message)
