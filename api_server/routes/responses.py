"""POST /v1/responses: OpenAI's newer API of chat, on the same turn as /v1/chat/completions.

A response may run in the background, be cancelled, and be stored if `store` asks for it.
"""

import asyncio
import logging
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api_server.app_state import AppState
from api_server.http.tenants import key_name_of, tenant_of
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.responses.answer import ResponsesAnswer, conversation_after
from api_server.protocol.responses.items import MAX_ITEMS, Item
from api_server.protocol.responses.request import (
    ResponsesRequest,
    chat_request,
    in_client_names,
    parse_request,
)
from api_server.protocol.responses.stored import Owner, num_bytes
from api_server.protocol.responses.tools import OfferedTools
from api_server.routes.chat import ChatTurn, build_chat_turn, is_template_error
from api_server.routes.common import app_state_of, read_fields
from proto.errors import InternalRequestError, InvalidRequestError, UnknownPathError, shown

logger = logging.getLogger("tokend.api")
router = APIRouter()
ID_PREFIX: Final = "resp_"


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    app_state = app_state_of(request)
    owner = (tenant_of(request, app_state.config.tenant_by), key_name_of(request))
    ignored = IgnoredFields()
    body, passed = parse_request(await read_fields(request, ignored), ignored)
    items = _conversation(app_state, owner, body)
    tools = OfferedTools(body.tools, body.tool_choice, ignored)

    def chat(*, is_folded: bool) -> ChatCompletionRequest:
        names = app_state.chat_template.facts.names
        return chat_request(body, passed, items, tools, names, ignored, is_folded=is_folded)

    async def build(chat: ChatCompletionRequest) -> ChatTurn:
        return await build_chat_turn(
            app_state,
            chat,
            id_prefix=ID_PREFIX,
            tenant=owner[0],
            key_name=owner[1],
            ignored=ignored,
            leaves_room=True,
        )

    plain = chat(is_folded=False)
    try:
        try:
            turn = await build(plain)
        except InvalidRequestError as error:
            another = chat(is_folded=True) if is_template_error(error) else plain
            if another == plain:
                raise
            turn = await build(another)
    except InvalidRequestError as error:
        raise in_client_names(error, tools) from None
    running = RunningResponse(app_state, owner, body, turn, tools, items)
    turn.stream.cleanup.enter_context(running)
    try:
        await turn.stream.submit(None if body.background else request)
    except InvalidRequestError as error:
        raise in_client_names(error, tools) from None
    if body.background:
        return running.continue_in_background()
    return turn.builder.response(turn.stream, running.answer)


class RunningResponse:
    """One response from its beginning to its end.

    items: the conversation so far. A context manager that lists it as running.
    """

    def __init__(
        self,
        app_state: AppState,
        owner: Owner,
        body: ResponsesRequest,
        turn: ChatTurn,
        tools: OfferedTools,
        items: list[Item],
    ) -> None:
        self._app_state = app_state
        self._owner = owner
        self._items = items
        self._turn = turn
        self._cancelled = False
        self.stored = body.store
        self.answer = ResponsesAnswer(turn.shape, body, turn.make_parser(), tools, self._keep)

    def __enter__(self) -> None:
        self._app_state.responses.enter(self._owner, self._turn.shape.id, self)

    def __exit__(self, *how: object) -> None:
        self._app_state.responses.leave(self._owner, self._turn.shape.id, self)

    def so_far(self) -> dict[str, Any]:
        return self.answer.so_far("cancelled" if self._cancelled else "in_progress")

    def cancel(self) -> dict[str, Any]:
        self._cancelled = True
        self._turn.stream.cancel()
        return self.so_far()

    def continue_in_background(self) -> Response:
        """Return the response so far; a task completes it."""
        app_state = self._app_state
        self._turn.stream.cleanup.enter_context(app_state.in_flight)  # a drain waits for it
        task = asyncio.create_task(self._complete())
        app_state.background.add(task)
        task.add_done_callback(app_state.background.discard)
        headers = {name.decode(): value.decode() for name, value in self._turn.builder.headers()}
        return JSONResponse(self.so_far(), headers=headers)

    async def _complete(self) -> None:
        stream, answer = self._turn.stream, self.answer
        try:
            while not stream.finished and stream.error is None:
                for delta in stream.take_deltas():
                    answer.chunk(delta)
                await stream.wait()
            if stream.error is not None:
                answer.failure(stream.error)
            else:
                answer.body(stream.take_deltas(), stream.usage())
        except Exception:  # no caller sees the exception: the response itself reports the failure
            logger.exception("%s: the answer could not be encoded", stream.label)
            answer.failure(InternalRequestError("internal error"))
        finally:
            stream.close()

    def _keep(self, response: dict[str, Any]) -> None:
        if self.stored:
            items = conversation_after(self._items, response)
            self._app_state.responses.keep(self._owner, response, items)


def _conversation(app_state: AppState, owner: Owner, body: ResponsesRequest) -> list[Item]:
    """The items that the answer is to follow; raises InvalidRequestError.

    What cannot be stored is refused before it is generated.
    """
    items: list[Item] = []
    if body.previous_response_id is not None:
        found = app_state.responses.find(owner, body.previous_response_id)
        if found is None:
            raise InvalidRequestError(
                "previous_response_id: there is no such response; only those with store are kept, "
                "in the memory of the daemon and for a while",
                "previous_response_id",
            )
        items += found.items
    if isinstance(body.input, str):
        items.append({"type": "message", "role": "user", "content": body.input})
    else:
        items += body.input
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError(
            f"input: at most {MAX_ITEMS} items with those before them, got {len(items)}", "input"
        )
    if body.store:
        _check_store(app_state, items)
    return items


def _check_store(app_state: AppState, items: list[Item]) -> None:
    """Raise InvalidRequestError for what cannot be kept."""
    most = app_state.responses.max_entry_bytes
    if not most:
        raise InvalidRequestError(
            "store: nothing is kept here (--max-stored-responses-mib is 0)", "store"
        )
    if app_state.config.api_server_count > 1:
        raise InvalidRequestError(
            "store: a response is kept by the API server that made it, and "
            "--api-server-count lets others be asked for it",
            "store",
        )
    if num_bytes(items) > most // 2:
        raise InvalidRequestError(
            f"store: conversations of up to {most // 2} bytes are kept", "store"
        )


# Responses by their id: looking at one, ending it, forgetting it.


stored_router = APIRouter()


@stored_router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> dict[str, Any]:
    if request.query_params.get("stream", "false").lower() != "false":
        raise InvalidRequestError("stream: a response that is kept is told as a whole", "stream")
    responses, owner = app_state_of(request).responses, _owner(request)
    running = responses.under_way(owner, response_id)
    if running is not None and running.stored:
        return running.so_far()
    stored = responses.find(owner, response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored.response


@stored_router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
    """Cancel a running response; a finished one does not change."""
    responses, owner = app_state_of(request).responses, _owner(request)
    running = responses.under_way(owner, response_id)
    if running is not None:
        return running.cancel()
    stored = responses.find(owner, response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored.response


@stored_router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    if not app_state_of(request).responses.drop(_owner(request), response_id):
        raise _unknown(response_id)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


def _owner(request: Request) -> tuple[int, str]:
    tenant_by = app_state_of(request).config.tenant_by
    return tenant_of(request, tenant_by), key_name_of(request)


def _unknown(response_id: str) -> UnknownPathError:
    return UnknownPathError(f"there is no response {shown(response_id)}", "response_id")
