"""The WebSocket at /v1/responses: one response after the other, with the events of its stream.

{"type": "response.create", fields of a response}  ──▶
                                                   ◀── events, up to response.completed
{"type": "response.create", "previous_response_id": …}  ──▶
                                                   ◀── …

A response.create gets exactly one last message: response.completed, .incomplete or .failed, or an
error if it was refused before it began.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocket, WebSocketDisconnect

from api_server.app_state import AppState
from api_server.errors import DrainingError, error_body
from api_server.http.connection import MAX_BODY_BYTES, Uploads
from api_server.protocol.encoder import event_data
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.responses.encoder import ResponsesEncoder, WarmupEncoder
from api_server.protocol.responses.input import Item
from api_server.protocol.responses.request import ResponsesRequest, parse_request
from api_server.protocol.responses.stored import History, json_size, said_items
from api_server.response import event_text, next_events
from api_server.routes.common import (
    REQUEST_ID_HEADER,
    add_header_fields,
    app_state_of,
)
from api_server.routes.responses import (
    PreparedResponse,
    conversation,
    owner_of,
    prepare_response,
    previous_items,
)
from api_server.routes.websocket import (
    accept_websocket,
    close_code,
    decode_message,
    receive_text,
)
from api_server.stream import TokenStream
from api_server.turns import CLIENT, run_for_body, run_in_turn
from proto.errors import InternalRequestError, InvalidRequestError, RequestError

logger = logging.getLogger("tokend.api")

router = APIRouter()

CONNECTION_SECONDS: Final = 3600.0
"""A connection ends after this time, or with the response that is running then."""


kept_histories: Final = Uploads()
"""Conversations that are kept for their connection. They have the limits of uploads, but do not
take from them: the largest one of the client with the most bytes is forgotten first."""


class ConnectionLimitError(InvalidRequestError):
    code = "websocket_connection_limit_reached"

    def __init__(self) -> None:
        super().__init__(
            f"a WebSocket stays open for {CONNECTION_SECONDS / 60:g} minutes: open another one"
        )


@router.websocket("/v1/responses")
async def create_responses(websocket: WebSocket) -> None:
    tenant = await accept_websocket(websocket, app_state_of(websocket))
    if tenant is not None:
        await ResponsesConnection(websocket, tenant).run()


@dataclass(frozen=True, slots=True)
class LastResponse:
    """The last response of a connection. history: with its own items."""

    id: str
    history: History


class ResponsesConnection:
    """One WebSocket, which may stay open between its responses while the engine is replaced.

    It reads one message ahead, so that it notices a disconnect while a response is running. The
    last response can be continued even if it is not stored, unless clients keep too many bytes.
    """

    def __init__(self, websocket: WebSocket, tenant: int) -> None:
        self._websocket = websocket
        self._last: LastResponse | None = None
        address = websocket.client.host if websocket.client is not None else ""
        self._kept = kept_histories.begin(address, lambda _: self._keep(None), tenant=tenant)
        self._stream: TokenStream | None = None
        self._is_disconnected = False

    async def run(self) -> None:
        """Return when the connection is closed."""
        ending = asyncio.create_task(self._wait_end())
        reading = self._start_reading()
        try:
            while True:
                await asyncio.wait({ending, reading}, return_when=asyncio.FIRST_COMPLETED)
                if ending.done():
                    await self._send_error(ending.result())
                    await self._websocket.close(close_code(ending.result()))
                    return
                text = reading.result()
                reading = self._start_reading()
                await self._answer(text)
        except WebSocketDisconnect:
            return
        finally:
            self._keep(None)
            ending.cancel()
            reading.cancel()
            await asyncio.gather(ending, reading, return_exceptions=True)

    def _keep(self, last: LastResponse | None) -> None:
        self._last = last
        self._kept.resize(0 if last is None else last.history.num_bytes)

    async def _wait_end(self) -> RequestError:
        """Return why the connection ends, when it must."""
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                await self._app_state.health.wait_drain()
        except TimeoutError:
            return ConnectionLimitError()
        return DrainingError()

    def _start_reading(self) -> asyncio.Task[str]:
        reading = asyncio.create_task(receive_text(self._websocket))
        reading.add_done_callback(self._note_disconnect)
        return reading

    def _note_disconnect(self, reading: asyncio.Task[str]) -> None:
        if reading.cancelled() or reading.exception() is None:
            return
        self._is_disconnected = True
        if self._stream is not None:
            self._stream.disconnect("disconnect")

    @property
    def _app_state(self) -> AppState:
        """The state for the next response; a reload replaces it."""
        app_state: AppState = self._websocket.app.state.app_state
        return app_state

    async def _answer(self, text: str) -> None:
        """Answer a message. One that is refused gets an error, and the connection stays open."""
        app_state, previous_id, failure = self._app_state, None, None
        with app_state.in_flight, app_state.metrics.in_flight:
            try:
                fields = await decode_message(text)
                previous_id = fields.get("previous_response_id")
                response = await self._prepare(app_state, fields)
                if await self._generate(response):
                    return
            except RequestError as error:
                failure = error
            except ClientDisconnect:
                raise WebSocketDisconnect from None
            except WebSocketDisconnect:
                raise
            except Exception:
                logger.exception("a message could not be answered")
                failure = InternalRequestError("internal error")
            finally:
                CLIENT.get().release_body()
            if self._last is not None and self._last.id == previous_id:
                self._keep(None)  # the API demands it: nothing continues a failed turn
            if failure is not None:
                app_state.request_log.log_refusal(failure, self._websocket.scope)
                await self._send_error(failure)

    async def _prepare(self, app_state: AppState, fields: dict[str, Any]) -> PreparedResponse:
        ignored = IgnoredFields()
        if fields.pop("type", None) != "response.create":
            raise InvalidRequestError('type must be "response.create"', "type")
        generates = fields.pop("generate", True)
        if not isinstance(generates, bool):
            raise InvalidRequestError("generate must be true or false", "generate")
        if fields.setdefault("stream", True) is not True:
            raise InvalidRequestError("stream: a WebSocket always gets events", "stream")
        if fields.get("background"):
            raise InvalidRequestError("background is not available on a WebSocket", "background")
        fields.setdefault("input", [])
        add_header_fields(fields, self._request_headers(), ignored)
        body, passed = await run_for_body(parse_request, fields, ignored)
        previous = await self._previous_items(app_state, body)
        history = await conversation(app_state, owner_of(self._websocket), body, previous)
        make_encoder = ResponsesEncoder
        if not generates:
            make_encoder = WarmupEncoder
            body = body.model_copy(update={"max_output_tokens": 1})
            passed.pop("min_tokens", None)
        return await prepare_response(
            app_state, self._websocket, body, passed, history, ignored, make_encoder
        )

    def _request_headers(self) -> Headers:
        """Return the headers of the handshake, without those that are for one request only."""
        headers = self._websocket.headers.mutablecopy()
        del headers[REQUEST_ID_HEADER]
        return headers

    async def _previous_items(self, app_state: AppState, body: ResponsesRequest) -> list[Item]:
        response_id = body.previous_response_id
        if self._last is not None and self._last.id == response_id:
            return self._last.history.items
        return await previous_items(app_state, owner_of(self._websocket), response_id)

    async def _generate(self, response: PreparedResponse) -> bool:
        """Submit a response and send its events; return False if it fails after its beginning.

        Raises the RequestError of a refusal.
        """
        stream, encoder = response.stream, response.encoder
        self._stream = stream
        try:
            if self._is_disconnected:
                raise WebSocketDisconnect
            await response.submit(None)
            await self._send_events(stream, encoder)
        finally:
            self._stream = None
            stream.close()
        final = encoder.final_response
        if final is None or final["status"] == "failed":
            return False
        before, output = response.history, said_items(final["output"])
        size = before.num_bytes + await run_in_turn(json_size, output)
        history = History([*before.items, *output], size)
        self._keep(LastResponse(final["id"], history) if size <= MAX_BODY_BYTES else None)
        return True

    async def _send_events(self, stream: TokenStream, encoder: ResponsesEncoder) -> None:
        begin = encoder.encode_start()
        while not stream.disconnected:
            events, is_last, error = next_events(stream, encoder)
            if error is not None:
                events.append(encoder.encode_failure(error))
            messages = event_data(await event_text([begin, *events]))
            stream.send_buffer.is_blocked = True  # visible to others only if `send` suspends
            for message in messages:
                await self._websocket.send_text(message)
            stream.send_buffer.is_blocked = False
            if is_last:
                return
            begin = ""
            await stream.wait()

    async def _send_error(self, error: RequestError) -> None:
        details = error_body(error)["error"] | {"code": error.code or error.type}
        event = {"type": "error", "status": error.status, "error": details}
        await self._websocket.send_text(json.dumps(event))
