"""The WebSocket at /v1/sessions: streaming input for completions.

{"type": "input", "prompt": …, fields of a completion}  ──▶
                                         ◀── chunks of a completion, up to a finish_reason
{"type": "input", "prompt": …}                          ──▶
                                         ◀── …
{"type": "end"}                                         ──▶
                                         ◀── close
"""

import asyncio
import contextlib
import json
import logging
import secrets
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocket, WebSocketDisconnect

from api_server.errors import SlowUploadError, error_body
from api_server.generation.app_state import AppState, RequestContext
from api_server.generation.encoders.completions import CompletionEncoder, Echo
from api_server.generation.request_builder import RequestBuilder
from api_server.generation.sampling import EndpointOptions
from api_server.generation.session import Session, Turn
from api_server.http.http_protocol import HEADER_SECONDS
from api_server.parsers.output_format import OutputFormat
from api_server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from api_server.protocol.fields import COMPLETION_NEUTRAL, IgnoredFields, parse
from api_server.protocol.structured import ResponseFormat
from api_server.routes.common import add_header_fields
from api_server.routes.websocket import accept_websocket, close_code, decode_message, receive_text
from api_server.text.prompts import num_prompts
from api_server.turns import current_client, run_for_body
from proto.codec import changed
from proto.errors import (
    InternalRequestError,
    InvalidRequestError,
    RequestError,
    context_length_error,
    require,
)
from proto.messages.sampling_params import SamplingParams

logger = logging.getLogger("tokend.api")

router = APIRouter()

FIXED_FIELDS: Final = (
    *("model", "seed", "priority", "cache_salt", "request_id", "lora", "data_parallel_rank"),
    "skip_reading_prefix_cache",
)
"""Fields that hold for a whole session."""

UNAVAILABLE_FIELDS: Final[dict[str, tuple[Any, ...]]] = {
    "stream": (True,),
    "n": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "stop": ([],),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "return_routed_experts": (False,),
    "truncate_prompt_tokens": (),
    "timeout_ms": (),
    "queue_timeout_ms": (),
    "agent_hint": (),
    "session_id": (),
    "response_format": (ResponseFormat(type="text"),),
    **dict.fromkeys(("structured_outputs", "grammar", "json_schema"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
}
"""Fields that a session does not have, with the values that have no effect.

`stop`: the engine may compute tokens after the string, before the front end finds it; they would
be part of the next turn's prompt."""


@router.websocket("/v1/sessions")
async def create_session(websocket: WebSocket) -> None:
    context = RequestContext(websocket)
    app_state = context.app_state
    with app_state.in_flight, app_state.metrics.in_flight:
        if await accept_websocket(websocket, context) is not None:
            await SessionConnection(websocket, app_state).run()


class SessionConnection:
    """One WebSocket: reads messages into a `Session` and sends its chunks."""

    def __init__(self, websocket: WebSocket, app_state: AppState) -> None:
        self._websocket = websocket
        self._app_state = app_state
        self._session = Session(app_state.client, app_state.open_streams)
        self._fields: dict[str, Any] = {}

    async def run(self) -> None:
        """Return when the session has ended or the client has disconnected."""
        session = self._session
        sending = asyncio.create_task(session.send_chunks(self._websocket.send_text))
        reading = asyncio.create_task(self._read_messages())
        draining = asyncio.create_task(self._end_at_drain())
        tasks = {sending, reading, draining}
        try:
            done, _ = await asyncio.wait({sending, reading}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not sending.done():
                raise WebSocketDisconnect
            await self._close()
        except WebSocketDisconnect:
            session.close(disconnected=True)
        except Exception:
            logger.exception("a session failed")
            session.fail(InternalRequestError("internal error"))
            with contextlib.suppress(WebSocketDisconnect):
                await self._close()
        finally:
            session.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        """Send the error of a failed session, and close the WebSocket."""
        error = self._session.error
        if error is not None:
            await self._send_error(error, None)
        await self._websocket.close(close_code(error))

    async def _read_messages(self) -> None:
        """Process messages until the client disconnects."""
        with contextlib.suppress(WebSocketDisconnect, ClientDisconnect):
            try:
                async with asyncio.timeout(HEADER_SECONDS):
                    while not self._session.is_open:
                        await self._read_message()
            except TimeoutError:
                self._session.fail(SlowUploadError(f"no input came in {HEADER_SECONDS:g} s"))
            while True:
                await self._read_message()

    async def _read_message(self) -> None:
        """Process a message; an invalid one gets an error, and the session continues."""
        text = await receive_text(self._websocket)
        event_id = None
        try:
            fields = await decode_message(text)
            event_id = fields.pop("event_id", None)
            kind = fields.pop("type", None)
            if kind == "end":
                self._session.end_input()
            elif kind == "input":
                await self._add_input(fields)
            else:
                raise InvalidRequestError('type must be "input" or "end"', "type")
        except RequestError as error:
            self._app_state.request_log.log_refusal(error, self._websocket.scope)
            await self._send_error(error, event_id)
        finally:
            current_client().release_body()

    async def _send_error(self, error: RequestError, event_id: object) -> None:
        """Send an error. event_id: of the message that caused it, if it had one."""
        body = error_body(error)
        if event_id is not None:
            body["error"]["event_id"] = event_id
        await self._websocket.send_text(json.dumps(body))

    async def _add_input(self, fields: dict[str, Any]) -> None:
        """Start or queue a turn. Fields that an input lacks are those of the input before."""
        session = self._session
        session.check_takes_input()
        context = RequestContext(self._websocket, self._app_state)
        ignored = context.ignored
        fields = self._merged_fields(fields, ignored)
        body = await run_for_body(parse, CompletionRequest, fields, COMPLETION_NEUTRAL, ignored)
        if str(ignored):
            raise InvalidRequestError(f"{ignored} is not known here", str(ignored).split(",")[0])
        _check_available(body)
        if self._app_state.adapters is not None:
            await self._app_state.adapters.prepare(body.model, context.key_name)
        builder = RequestBuilder(context, body, "cmpl-", None)
        prompts = await self._app_state.prompt_reader("prompt").read_prompts(
            body.prompt, add_special_tokens=body.add_special_tokens
        )
        options = EndpointOptions(
            max_tokens=body.requested_max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=None,
        )
        stream = await builder.build_stream(prompts, options, OutputFormat(), session.notifier)
        params = stream.requests[0].sampling_params
        params = self._fitting_params(body, params, prompts[0].token_ids)
        texts = await builder.prompt_texts(prompts)
        encoder = CompletionEncoder(
            builder.response_options(body.logprobs), stream.streams, [Echo()], texts
        )
        session.add_turn(Turn(stream, encoder, prompts[0].token_ids), params)
        self._fields = fields

    def _merged_fields(self, fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
        """Return the fields of a turn."""
        require("prompt" in fields, "prompt", "is missing")
        if not self._session.is_open:
            add_header_fields(fields, self._websocket.headers, ignored)
            fields["request_id"] = fields.get("request_id") or secrets.token_hex(16)
        else:
            for name in FIXED_FIELDS:
                if name in fields and fields[name] != self._fields.get(name):
                    raise InvalidRequestError(f"{name} cannot change within a session", name)
        return {**self._fields, "stream": True, **fields}

    def _fitting_params(
        self, body: CompletionRequest, params: SamplingParams, token_ids: list[int]
    ) -> SamplingParams:
        """Return the parameters with a default `max_tokens` that the context leaves.

        Raises ContextLengthError if it leaves too few.
        """
        max_model_len = self._app_state.client.engine.max_model_len
        num_tokens = self._session.num_tokens + len(token_ids)
        left = max_model_len - num_tokens
        if left < 1:
            raise context_length_error(
                max_model_len, f"The session would have {num_tokens} tokens.", "prompt"
            )
        if body.requested_max_tokens is None:
            return changed(params, max_tokens=min(params.max_tokens, left))
        if body.requested_max_tokens > left:
            raise context_length_error(
                max_model_len,
                f"{num_tokens} tokens of the session and max_tokens {body.requested_max_tokens} "
                f"make {num_tokens + body.requested_max_tokens}.",
                "max_tokens",
            )
        return params

    async def _end_at_drain(self) -> None:
        await self._app_state.health.wait_drain()
        self._session.drain()


def _check_available(body: CompletionRequest) -> None:
    """Raise InvalidRequestError for a field that a session does not have."""
    for name, neutral in UNAVAILABLE_FIELDS.items():
        if name in body.model_fields_set and getattr(body, name) not in neutral:
            raise InvalidRequestError(f"{name} is not available in a session", name)
    if num_prompts(body.prompt) != 1:
        raise InvalidRequestError("an input has one prompt", "prompt")
