"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API.

A body is translated into one of /v1/chat/completions and built by its `build_chat_turn`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api_server.errors import new_request_id
from api_server.generation.app_state import RequestContext
from api_server.generation.encoders.messages import MessageEncoder
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.messages.input import system_text
from api_server.protocol.messages.request import (
    CountTokensRequest,
    MessagesRequest,
    MessagesTranslation,
    parse_request,
)
from api_server.routes.chat import (
    ChatTurn,
    build_chat_turn,
    count_tokens,
    with_merged_roles_fallback,
)
from api_server.routes.common import read_fields
from proto.errors import InvalidRequestError

router = APIRouter()
ID_PREFIX: Final = "msg_"


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    context = RequestContext(request)
    context.app_state.check_generates("Messages API")
    body, passed = await read_fields(context, partial(parse_request, MessagesRequest))
    translation = _translation(context, body, passed)

    async def build(chat: ChatCompletionRequest) -> ChatTurn:
        return await build_chat_turn(
            context, chat, ID_PREFIX, default_max_tokens=body.max_tokens, reserves_context=True
        )

    turn = await with_merged_roles_fallback(translation, build)
    num_prompt_tokens = len(turn.stream.streams[0].prompt_token_ids)
    parser = turn.choice_parsers[0]
    encoder = MessageEncoder(turn.options, body, parser, translation, num_prompt_tokens)
    try:
        await turn.stream.submit(request)
    except InvalidRequestError as error:
        raise translation.translate_error(error) from None
    request_id = (b"request-id", turn.options.id.encode())
    return turn.builder.response(turn.stream, encoder, [request_id])


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(request: Request) -> Response:
    """Return the number of prompt tokens of the same request to /v1/messages."""
    context = RequestContext(request)
    body, passed = await read_fields(context, partial(parse_request, CountTokensRequest))
    translation = _translation(context, body, passed)
    number = await with_merged_roles_fallback(translation, partial(count_tokens, context))
    response = JSONResponse({"input_tokens": number})
    response.headers["request-id"] = new_request_id()
    response.raw_headers += context.ignored.headers()
    return response


def _translation(
    context: RequestContext, body: CountTokensRequest, passed: Mapping[str, Any]
) -> MessagesTranslation:
    app_state = context.app_state
    template = app_state.template_for(body.tools, body.tool_choice)
    return MessagesTranslation(
        body,
        passed,
        system_text(body.system, context.ignored),
        context.ignored,
        template_names=template.facts.names,
        has_reasoning=app_state.reasoning_format(template).has_reasoning,
    )
