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
from typing import Any, Final

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocket, WebSocketDisconnect

from api_server.errors import DrainingError, error_body
from api_server.generation.app_state import AppState, RequestContext
from api_server.generation.encoders.base import event_data
from api_server.generation.encoders.responses.encoder import ResponsesEncoder, WarmupEncoder
from api_server.generation.encoders.responses.stored import History, json_size, said_items
from api_server.generation.response import event_text, next_events
from api_server.generation.stream import TokenStream
from api_server.http.connection import MAX_BODY_BYTES, Uploads
from api_server.protocol.responses.request import parse_request
from api_server.routes.common import REQUEST_ID_HEADER, add_header_fields
from api_server.routes.responses import PreparedResponse, conversation, prepare_response
from api_server.routes.websocket import accept_websocket, close_code, decode_message, receive_text
from api_server.turns import current_client, run_for_body, run_in_turn
from proto.errors import InternalRequestError, InvalidRequestError, RequestError, require

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
    tenant = await accept_websocket(websocket, RequestContext(websocket))
    if tenant is not None:
        await ResponsesConnection(websocket, tenant).run()


class ResponsesConnection:
    """One WebSocket, which may stay open between its responses while the engine is replaced.

    It reads one message ahead, so that it notices a disconnect while a response is running. The
    last response can be continued even if it is not stored, unless clients keep too many bytes.
    """

    def __init__(self, websocket: WebSocket, tenant: int) -> None:
        self._websocket = websocket
        self._last_id: str | None = None
        self._last: History | None = None  # with the items of the last response
        address = websocket.client.host if websocket.client is not None else ""
        self._kept = kept_histories.begin(address, lambda _: self._keep(None, None), tenant=tenant)
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
                    why = ending.result()
                    if not isinstance(why, DrainingError):
                        await self._send_error(why)
                    await self._websocket.close(close_code(why), why.message)
                    return
                text = reading.result()
                reading = self._start_reading()
                await self._answer(text)
        except WebSocketDisconnect:
            return
        finally:
            self._keep(None, None)
            ending.cancel()
            reading.cancel()
            await asyncio.gather(ending, reading, return_exceptions=True)

    def _keep(self, response_id: str | None, history: History | None) -> None:
        """Keep the conversation up to a response for the next one; None to forget it."""
        self._last_id, self._last = response_id, history
        self._kept.resize(0 if history is None else history.num_bytes)

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
                context = RequestContext(self._websocket, app_state)
                response = await self._prepare(context, fields)
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
                current_client().release_body()
            if previous_id == self._last_id:
                self._keep(None, None)  # the API demands it: nothing continues a failed turn
            if failure is not None:
                app_state.request_log.log_refusal(failure, self._websocket.scope)
                await self._send_error(failure)

    async def _prepare(self, context: RequestContext, fields: dict[str, Any]) -> PreparedResponse:
        require(fields.pop("type", None) == "response.create", "type", 'must be "response.create"')
        generates = fields.pop("generate", True)
        require(isinstance(generates, bool), "generate", "must be true or false")
        if fields.setdefault("stream", True) is not True:
            raise InvalidRequestError("stream: a WebSocket always gets events", "stream")
        require(not fields.get("background"), "background", "is not available on a WebSocket")
        fields.setdefault("input", [])
        add_header_fields(fields, self._request_headers(), context.ignored)
        if context.app_state.adapters is not None:
            await context.app_state.adapters.prepare(fields.get("model"), context.key_name)
        body, passed = await run_for_body(parse_request, fields, context.ignored)
        last = self._last if body.previous_response_id == self._last_id else None
        history = await conversation(context, body, None if last is None else last.items)
        make_encoder = ResponsesEncoder
        if not generates:
            make_encoder = WarmupEncoder
            body = body.model_copy(update={"max_output_tokens": 1})
            passed.pop("min_tokens", None)
        return await prepare_response(context, body, passed, history, make_encoder)

    def _request_headers(self) -> Headers:
        """Return the headers of the handshake, without those that are for one request only."""
        headers = self._websocket.headers.mutablecopy()
        del headers[REQUEST_ID_HEADER]
        return headers

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
        is_kept = size <= MAX_BODY_BYTES
        self._keep(final["id"] if is_kept else None, history if is_kept else None)
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
