"""What the routes of WebSockets share: the handshake, messages of JSON, the code of a close."""

from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from api_server.errors import NotAvailableError, error_response
from api_server.generation.app_state import RequestContext
from api_server.protocol.decoding import decode_json
from api_server.turns import current_client, run_for_body
from proto.errors import InvalidRequestError, OverloadedError, RequestError


async def accept_websocket(websocket: WebSocket, context: RequestContext) -> int | None:
    """Accept a WebSocket and return its tenant; None if it was refused."""
    try:
        tenant = context.tenant
        _ = context.app_state.client.engine
    except RequestError as error:
        await websocket.send_denial_response(error_response(error, websocket.scope))
        return None
    await websocket.accept()
    return tenant


async def receive_text(websocket: WebSocket) -> str:
    """Return the text of the next message, "" for a binary one; raises WebSocketDisconnect."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"])
    return message.get("text") or ""


async def decode_message(text: str) -> dict[str, Any]:
    """Return the JSON object of a message; raises InvalidRequestError.

    Its caller calls `Client.release_body` when it has processed the message.
    """
    body = bytearray(text.encode())
    await current_client().hold_body(body)
    fields = await run_for_body(decode_json, body, "message")
    if not isinstance(fields, dict):
        raise InvalidRequestError("a message must be a JSON object")
    return fields


def close_code(error: RequestError | None) -> int:
    """Return the status code of a WebSocket's close frame (RFC 6455, 7.4.1, and IANA's list)."""
    if error is None:
        return 1000
    if isinstance(error, NotAvailableError):
        return 1012  # the service restarts
    if isinstance(error, OverloadedError):
        return 1013  # try again later
    return 1008 if error.status < 500 else 1011
