"""/v1/responses: OpenAI's Responses API.

Create, get, cancel and delete a response, count the tokens of a request, compact a conversation.

A body is translated into one of /v1/chat/completions and built by its `build_chat_turn`. A response
may run in the background, be cancelled, and be stored (field `store`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar

from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from api_server.app_state import AppState
from api_server.http.connection import MAX_BODY_BYTES
from api_server.http.tenants import key_name_of, tenant_of
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.encoder import json_parts
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.responses.compaction import (
    CompactionEncoder,
    parse_compaction,
    summary_conversation,
)
from api_server.protocol.responses.encoder import ResponsesEncoder
from api_server.protocol.responses.input import (
    MAX_ITEMS,
    Item,
    is_reference,
    listed_item,
    with_id,
)
from api_server.protocol.responses.request import (
    ResponsesRequest,
    ResponsesTranslation,
    parse_request,
)
from api_server.protocol.responses.stored import (
    History,
    Owner,
    ResponseRecord,
    RunningResponse,
    json_size,
)
from api_server.response import JsonResponse
from api_server.routes.chat import (
    ChatTurn,
    build_chat_turn,
    count_tokens,
    with_merged_roles_fallback,
)
from api_server.routes.common import app_state_of, page_limit, read_fields
from api_server.stream import TokenStream
from api_server.turns import CLIENT, run_for_body, run_in_turn
from proto.errors import InternalRequestError, InvalidRequestError, UnknownPathError, shown

logger = logging.getLogger("tokend.api")
router = APIRouter()
MAX_PAGE: Final = 100
Result = TypeVar("Result")


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    app_state, owner, ignored = app_state_of(request), owner_of(request), IgnoredFields()
    app_state.check_generates("Responses API")
    body, passed = await read_fields(request, ignored, partial(parse_request, ignored=ignored))
    previous = await previous_items(app_state, owner, body.previous_response_id)
    history = await conversation(app_state, owner, body, previous)
    response = await prepare_response(app_state, request, body, passed, history, ignored)
    await response.submit(None if body.background else request)
    turn, encoder = response.turn, response.encoder
    if body.background:
        return _continue_in_background(app_state, turn, encoder)
    return turn.builder.response(turn.stream, encoder)


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A response whose engine request is built. history: before it."""

    turn: ChatTurn
    encoder: ResponsesEncoder
    translation: ResponsesTranslation
    history: History

    @property
    def stream(self) -> TokenStream:
        return self.turn.stream

    async def submit(self, request: Request | None) -> None:
        """Send the engine request, as `TokenStream.submit`, with errors in the client's terms."""
        try:
            await self.stream.submit(request)
        except InvalidRequestError as error:
            raise self.translation.translate_error(error) from None


async def prepare_response(
    app_state: AppState,
    connection: HTTPConnection,
    body: ResponsesRequest,
    passed: dict[str, Any],
    history: History,
    ignored: IgnoredFields,
    make_encoder: Callable[..., ResponsesEncoder] = ResponsesEncoder,
) -> PreparedResponse:
    """Build the engine request of a response. It can be cancelled until its stream is closed.

    passed: fields for the chat. history: with the items of the request. make_encoder: the class of
    the encoder.
    Raises InvalidRequestError.
    """
    owner = owner_of(connection)
    stores = _stores_response(app_state, body, history)
    names = app_state.template_for(body.tools, body.tool_choice).facts.names
    translation = ResponsesTranslation(body, passed, history.items, ignored, template_names=names)

    async def build(chat: ChatCompletionRequest) -> ChatTurn:
        prefix = app_state.peers.id_prefix
        return await build_chat_turn(
            app_state, connection, chat, ignored, prefix, reserves_context=True
        )

    turn = await with_merged_roles_fallback(translation, build)
    record = ResponseRecord(app_state.responses, owner, history) if stores else None
    # the response repeats the values that apply
    params = turn.stream.requests[0].sampling_params
    body = body.model_copy(update={"temperature": params.temperature, "top_p": params.top_p})
    parser, response_id = turn.choice_parsers[0], turn.options.id
    encoder = make_encoder(turn.options, body, parser, translation, record)
    running = RunningResponse(turn.stream, encoder, record)
    app_state.responses.add_running(owner, response_id, running)
    turn.stream.cleanup.callback(app_state.responses.remove_running, owner, response_id, running)
    return PreparedResponse(turn, encoder, translation, history)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    """Return the number of prompt tokens of the same request to /v1/responses."""
    app_state, owner, ignored = app_state_of(request), owner_of(request), IgnoredFields()
    body, passed = await read_fields(request, ignored, partial(parse_request, ignored=ignored))
    previous = await previous_items(app_state, owner, body.previous_response_id)
    history = await conversation(app_state, owner, body, previous)
    names = app_state.template_for(body.tools, body.tool_choice).facts.names
    translation = ResponsesTranslation(body, passed, history.items, ignored, template_names=names)

    async def count(chat: ChatCompletionRequest) -> int:
        return await count_tokens(app_state, chat, ignored)

    number = await with_merged_roles_fallback(translation, count)
    response = JSONResponse({"object": "response.input_tokens", "input_tokens": number})
    response.raw_headers += ignored.headers()
    return response


@router.post("/v1/responses/compact")
async def compact_conversation(request: Request) -> Response:
    """Return a window of items that replaces a conversation; the model writes its summary."""
    app_state, owner, ignored = app_state_of(request), owner_of(request), IgnoredFields()
    max_model_len = app_state.client.engine.max_model_len
    read = partial(parse_compaction, max_model_len=max_model_len, ignored=ignored)
    body, passed = await read_fields(request, ignored, read)
    previous = await previous_items(app_state, owner, body.previous_response_id)
    history = await conversation(app_state, owner, body, previous)
    encoder = partial(CompactionEncoder, items=history.items, max_characters=max_model_len)
    summarised = replace(history, items=summary_conversation(history.items))
    response = await prepare_response(
        app_state, request, body, passed, summarised, ignored, encoder
    )
    await response.submit(request)
    return response.turn.builder.response(response.stream, response.encoder)


def _continue_in_background(
    app_state: AppState, turn: ChatTurn, encoder: ResponsesEncoder
) -> Response:
    """Return the response so far; a task completes it."""
    turn.stream.cleanup.enter_context(app_state.in_flight)  # a drain waits for it
    task = asyncio.create_task(_complete_response(turn.stream, encoder))
    app_state.background.add(task)
    task.add_done_callback(app_state.background.discard)
    headers = {name.decode(): value.decode() for name, value in turn.builder.headers()}
    return JSONResponse(encoder.snapshot(), headers=headers)


async def _complete_response(stream: TokenStream, encoder: ResponsesEncoder) -> None:
    try:
        while not stream.finished and stream.error is None:
            for delta in stream.pop_deltas():
                encoder.encode_delta(delta)
            await stream.wait()
        if stream.error is not None:
            encoder.encode_error(stream.error)
        else:
            await encoder.encode_body(stream.pop_deltas(), stream.usage())
    except Exception:  # no caller sees the exception: the response itself reports the failure
        logger.exception("%s: the response could not be encoded", stream.label)
        encoder.encode_error(InternalRequestError("internal error"))
    finally:
        stream.close()


class PreviousResponseError(InvalidRequestError):
    """There is no response with the `previous_response_id` of a request."""

    code = "previous_response_not_found"


async def previous_items(app_state: AppState, owner: Owner, response_id: str | None) -> list[Item]:
    """Return the items of a stored response and its conversation; none for None."""
    if response_id is None:
        return []
    found = await app_state.peers.read_items("conversation", owner, response_id)
    if found is None:
        raise PreviousResponseError(
            "previous_response_id: there is no such response; those with store are kept, in "
            "memory and for a limited time",
            "previous_response_id",
        )
    return found


async def conversation(
    app_state: AppState, owner: Owner, body: ResponsesRequest, previous: list[Item]
) -> History:
    """Return the previous items and those of a request; raises InvalidRequestError.

    References are replaced by the items of the client's stored responses that they name, in
    whichever front end. Those to previous items are left out; those to nothing stay. Each may stand
    once, so that no short body makes a long conversation.
    """
    items = list(previous)
    if isinstance(body.input, str):
        items.append(with_id({"type": "message", "role": "user", "content": body.input}))
        found = {}
    else:
        named = Counter(item["id"] for item in body.input if is_reference(item))
        for item_id, number in named.most_common(1):
            if number > 1:
                raise InvalidRequestError(
                    f"input: {number} references to the item {shown(item_id)}: send one", "input"
                )
        repeated = named.keys() & {item["id"] for item in previous}
        found = await app_state.peers.find_items(owner, named.keys() - repeated)
        items += [
            found.get(item["id"], item) if is_reference(item) else item
            for item in body.input
            if not (is_reference(item) and item["id"] in repeated)
        ]
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError(
            f"input: at most {MAX_ITEMS} items with those before them, got {len(items)}", "input"
        )
    if not items and body.instructions is None:
        raise InvalidRequestError("input must not be empty", "input")
    if not (previous or found):
        return History(items, await run_for_body(json_size, items))
    history = History(items, await run_in_turn(json_size, items))
    if history.num_bytes > MAX_BODY_BYTES:
        raise InvalidRequestError(
            f"input: the items with those before them take {history.num_bytes} bytes, "
            f"more than {MAX_BODY_BYTES}",
            "input",
        )
    client = CLIENT.get()
    client.count_body(max(client.body_size, history.num_bytes))  # further work is on all items
    return history


def _stores_response(app_state: AppState, body: ResponsesRequest, history: History) -> bool:
    """Return whether the response will be stored.

    Raises InvalidRequestError, before anything is generated, if it cannot be stored but must be.
    """
    if body.store is False:
        return False
    try:
        _check_store(app_state, history)
    except InvalidRequestError:
        if body.store or body.background:
            raise
        return False
    return True


def _check_store(app_state: AppState, history: History) -> None:
    """Raise InvalidRequestError for a conversation that cannot be stored."""
    max_bytes = app_state.responses.max_entry_bytes
    if not max_bytes:
        raise InvalidRequestError(
            "store: storing is disabled (--max-stored-responses-mib is 0)", "store"
        )
    if history.num_bytes > max_bytes // 2:
        raise InvalidRequestError(
            f"store: the conversation is larger than {max_bytes // 2} bytes", "store"
        )


stored_router = APIRouter()


@stored_router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream", "false").lower() != "false":
        raise InvalidRequestError("stream: a stored response cannot be streamed", "stream")
    return await _json_response(request, "get", response_id)


@stored_router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """Return a page of the conversation before a response, the newest item first by default."""
    peers, owner = app_state_of(request).peers, owner_of(request)
    items = _found(await peers.read_items("input_items", owner, response_id), response_id)
    return JsonResponse(json_parts(_page(items, request.query_params)), ())


def _page(items: list[Item], query: QueryParams) -> dict[str, Any]:
    """Return the items that a query selects, as a list of OpenAI's API."""
    order, after = query.get("order", "desc"), query.get("after")
    limit = page_limit(query, MAX_PAGE)
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be 'asc' or 'desc'", "order")
    items = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequestError(f"after: there is no item {shown(after)}", "after")
        start = ids.index(after) + 1
    page = [listed_item(item) for item in items[start : start + limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


@stored_router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a running response; a finished one does not change."""
    return await _json_response(request, "cancel", response_id)


@stored_router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    peers, owner = app_state_of(request).peers, owner_of(request)
    _found(await peers.delete_response(owner, response_id) or None, response_id)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


async def _json_response(
    request: Request, operation: Literal["get", "cancel"], response_id: str
) -> Response:
    peers, owner = app_state_of(request).peers, owner_of(request)
    parts = _found(await peers.read_response(operation, owner, response_id), response_id)
    return JsonResponse(parts, ())


def _found(result: Result | None, response_id: str) -> Result:
    """Return the result of an operation; raise UnknownPathError if there is no such response."""
    if result is None:
        raise UnknownPathError(f"there is no response {shown(response_id)}", "response_id")
    return result


def owner_of(request: HTTPConnection) -> Owner:
    tenant_by = app_state_of(request).config.tenant_by
    return tenant_of(request, tenant_by), key_name_of(request)
