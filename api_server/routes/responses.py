"""/v1/responses: OpenAI's Responses API.

Create, get, cancel and delete a response, count or render the tokens of a request, compact a
conversation.

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
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api_server.generation.app_state import AppState, RequestContext
from api_server.generation.encoders.base import json_parts
from api_server.generation.encoders.responses.encoder import CompactionEncoder, ResponsesEncoder
from api_server.generation.encoders.responses.stored import (
    History,
    ResponseRecord,
    RunningResponse,
    json_size,
)
from api_server.generation.response import JsonResponse
from api_server.generation.stream import TokenStream
from api_server.http.connection import MAX_BODY_BYTES
from api_server.protocol.responses.compaction import parse_compaction, summary_conversation
from api_server.protocol.responses.input import MAX_ITEMS, Item, is_reference, listed_item, with_id
from api_server.protocol.responses.request import (
    ResponsesRequest,
    ResponsesTranslation,
    parse_request,
)
from api_server.routes.chat import (
    ChatTurn,
    build_chat_turn,
    count_tokens,
    with_merged_roles_fallback,
)
from api_server.routes.common import page_limit, read_fields
from api_server.turns import current_client, run_for_body, run_in_turn
from proto.errors import InternalRequestError, InvalidRequestError, UnknownPathError, require, shown

logger = logging.getLogger("tokend.api")
router = APIRouter()
MAX_PAGE: Final = 100
Result = TypeVar("Result")


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    context = RequestContext(request)
    context.app_state.check_generates("Responses API")
    body, passed = await read_fields(context, parse_request)
    history = await conversation(context, body)
    response = await prepare_response(context, body, passed, history)
    await response.submit(None if body.background else request)
    turn, encoder = response.turn, response.encoder
    if body.background:
        return _continue_in_background(context.app_state, turn, encoder)
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
    context: RequestContext,
    body: ResponsesRequest,
    passed: dict[str, Any],
    history: History,
    make_encoder: Callable[..., ResponsesEncoder] = ResponsesEncoder,
) -> PreparedResponse:
    """Build the engine request of a response. It can be cancelled until its stream is closed.

    passed: fields for the chat. history: with the items of the request. make_encoder: the class of
    the encoder.
    Raises InvalidRequestError.
    """
    app_state, owner = context.app_state, context.owner
    stores = _stores_response(app_state, body, history)
    translation = _translation(context, body, passed, history)

    turn = await _build_turn(context, translation)
    record = ResponseRecord(app_state.responses, owner, history) if stores else None
    # the response repeats the values that apply
    params = turn.stream.requests[0].sampling_params
    body = body.model_copy(update={"temperature": params.temperature, "top_p": params.top_p})
    parser, response_id = turn.choice_parsers[0], turn.options.id
    encoder = make_encoder(turn.options, body, parser, translation, record)
    running = RunningResponse(turn.stream, encoder)
    app_state.responses.add_running(owner, response_id, running)
    turn.stream.cleanup.callback(app_state.responses.remove_running, owner, response_id, running)
    return PreparedResponse(turn, encoder, translation, history)


async def _build_turn(context: RequestContext, translation: ResponsesTranslation) -> ChatTurn:
    id_prefix = context.app_state.peers.id_prefix
    build = partial(build_chat_turn, context, id_prefix=id_prefix, reserves_context=True)
    return await with_merged_roles_fallback(translation, build)


async def _read_translation(context: RequestContext) -> ResponsesTranslation:
    body, passed = await read_fields(context, parse_request)
    return _translation(context, body, passed, await conversation(context, body))


def _translation(
    context: RequestContext, body: ResponsesRequest, passed: dict[str, Any], history: History
) -> ResponsesTranslation:
    template = context.app_state.template_for(body.tools, body.tool_choice)
    return ResponsesTranslation(
        body, passed, history.items, context.ignored, template_names=template.facts.names
    )


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    """Return the number of prompt tokens of the same request to /v1/responses."""
    context = RequestContext(request)
    translation = await _read_translation(context)
    number = await with_merged_roles_fallback(translation, partial(count_tokens, context))
    response = JSONResponse({"object": "response.input_tokens", "input_tokens": number})
    response.raw_headers += context.ignored.headers()
    return response


@router.post("/v1/responses/render")
async def render_response(request: Request) -> Response:
    """Return the prompt's token ids and sampling parameters, as vLLM does; nothing is computed."""
    context = RequestContext(request)
    context.app_state.check_generates("Responses API")
    turn = await _build_turn(context, await _read_translation(context))
    return turn.builder.render_response(turn.stream)


@router.post("/v1/responses/compact")
async def compact_conversation(request: Request) -> Response:
    """Return a window of items that replaces a conversation; the model writes its summary."""
    context = RequestContext(request)
    max_model_len = context.app_state.client.engine.max_model_len
    read = partial(parse_compaction, max_model_len=max_model_len)
    body, passed = await read_fields(context, read)
    history = await conversation(context, body)
    encoder = partial(CompactionEncoder, items=history.items, max_characters=max_model_len)
    summarised = replace(history, items=summary_conversation(history.items))
    response = await prepare_response(context, body, passed, summarised, encoder)
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


async def _previous_items(context: RequestContext, response_id: str | None) -> list[Item]:
    """Return the items of a stored response and its conversation; none for None."""
    if response_id is None:
        return []
    peers = context.app_state.peers
    found = await peers.read_items("conversation", context.owner, response_id)
    if found is None:
        raise PreviousResponseError(
            "previous_response_id: there is no such response; those with store are kept, in "
            "memory and for a limited time",
            "previous_response_id",
        )
    return found


async def conversation(
    context: RequestContext, body: ResponsesRequest, previous: list[Item] | None = None
) -> History:
    """Return the previous items and those of a request; raises InvalidRequestError.

    previous: None for those of the stored response that the request names.
    References are replaced by the items of the client's stored responses that they name, in
    whichever front end. Those to previous items are left out; those to nothing stay. Each may stand
    once, so that no short body makes a long conversation.
    """
    if previous is None:
        previous = await _previous_items(context, body.previous_response_id)
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
        new = named.keys() - repeated
        found = await context.app_state.peers.find_items(context.owner, new)
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
    client = current_client()
    client.count_body(max(client.body_size, history.num_bytes))  # further work is on all items
    return history


def _stores_response(app_state: AppState, body: ResponsesRequest, history: History) -> bool:
    """Return whether the response will be stored.

    Raises InvalidRequestError, before anything is generated, if it cannot be stored but must be.
    """
    if body.store is False:
        return False
    most, problem = app_state.responses.max_entry_bytes, ""
    if not most:
        problem = "storing is disabled (--max-stored-responses-mib is 0)"
    elif history.num_bytes > most // 2:
        problem = f"the conversation is larger than {most // 2} bytes"
    if problem and (body.store or body.background):
        raise InvalidRequestError(f"store: {problem}", "store")
    return not problem


stored_router = APIRouter()


@stored_router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream", "false").lower() != "false":
        raise InvalidRequestError("stream: a stored response cannot be streamed", "stream")
    return await _json_response(request, "get", response_id)


@stored_router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """Return a page of the conversation before a response, the newest item first by default."""
    context = RequestContext(request)
    peers = context.app_state.peers
    items = _found(await peers.read_items("input_items", context.owner, response_id), response_id)
    return JsonResponse(json_parts(_page(items, request.query_params)), ())


def _page(items: list[Item], query: QueryParams) -> dict[str, Any]:
    """Return the items that a query selects, as a list of OpenAI's API."""
    order, after = query.get("order", "desc"), query.get("after")
    limit = page_limit(query, MAX_PAGE)
    require(order in ("asc", "desc"), "order", "must be 'asc' or 'desc'")
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
    context = RequestContext(request)
    peers = context.app_state.peers
    _found(await peers.delete_response(context.owner, response_id) or None, response_id)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


async def _json_response(
    request: Request, operation: Literal["get", "cancel"], response_id: str
) -> Response:
    context = RequestContext(request)
    peers = context.app_state.peers
    parts = _found(await peers.read_response(operation, context.owner, response_id), response_id)
    return JsonResponse(parts, ())


def _found(result: Result | None, response_id: str) -> Result:
    """Return the result of an operation; raise UnknownPathError if there is no such response."""
    if result is None:
        raise UnknownPathError(f"there is no response {shown(response_id)}", "response_id")
    return result
