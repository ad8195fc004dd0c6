"""POST /v1/chat/completions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.app_state import AppState
from api_server.http.tenants import key_name_of, tenant_of
from api_server.parsers.parts import CountedParser, PartsParser
from api_server.parsers.thinking import switches, thoughts_of
from api_server.parsers.tool_calling import Calling
from api_server.protocol.answers import Shape
from api_server.protocol.chat import ChatAnswer, ChatCompletionRequest
from api_server.protocol.fields import CHAT_NEUTRAL, IgnoredFields, parse
from api_server.request_builder import EndpointOptions, RequestBuilder, check_thoughts
from api_server.routes.common import app_state_of, read_fields
from api_server.sampling import logit_edits
from api_server.stream import TokenStream
from api_server.text.chat_prompt import conversation_of, num_characters
from api_server.text.chat_template import Conversation
from api_server.text.prompts import PromptReader
from proto.errors import InvalidRequestError

# A turn of a chat, whatever API it came by: from messages to a generation.


ANSWERS_SHARE: Final = 4
"""A truncated prompt leaves one such part of the context to an answer without a limit."""

_TEMPLATE: Final = ("chat template:", "the chat template cannot")


def is_template_error(error: InvalidRequestError) -> bool:
    """Whether the chat template refuses the conversation, and may take it in another form."""
    return error.message.startswith(_TEMPLATE)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One answer to a chat: its token stream, and how its text is parsed.

    prompt_text: None if it is not shown. make_parser: returns the parser of one choice.
    """

    builder: RequestBuilder
    stream: TokenStream
    shape: Shape
    prompt_text: str | None
    make_parser: Callable[[], PartsParser]


async def build_chat_turn(
    app_state: AppState,
    body: ChatCompletionRequest,
    *,
    id_prefix: str,
    tenant: int,
    key_name: str,
    ignored: IgnoredFields,
    at_most: int | None = None,
    leaves_room: bool = False,
) -> ChatTurn:
    """Build the engine request of a chat and its token stream; `TokenStream.submit` sends it.

    id_prefix: of the answer's id. at_most: default of the output tokens, limited by the context.
    leaves_room: a truncated prompt leaves a share of the context to an answer without a limit.
    Raises InvalidRequestError.
    """
    calling = app_state.tool_caller.calling(body, body.grammar_source)
    builder = RequestBuilder(app_state, body, id_prefix, tenant, key_name, ignored, calling)
    reader = app_state.prompt_reader("messages")
    wanted = body.wanted_max_tokens
    if wanted is None and leaves_room:
        share = app_state.client.engine.max_model_len // ANSWERS_SHARE
        wanted = share if at_most is None else min(at_most, share)
    reader = reader.with_truncation(builder.truncation(wanted))
    style = app_state.reasoning_style
    conversation, text = await _rendered(app_state, body, reader, ignored)
    prompts = await reader.encode([text], add_special_tokens=False)
    thoughts = await thoughts_of(
        style,
        app_state.tokenizer,
        conversation,
        text,
        budget=body.thinking_token_budget,
        has_grammar=builder.has_grammar,
        shows=body.include_reasoning,
    )
    check_thoughts(body, thoughts.rule)

    def make_parser() -> PartsParser:
        return thoughts.parser(calling.make_parser())

    options = EndpointOptions(
        max_tokens=body.wanted_max_tokens,
        default_max_tokens=at_most,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        max_tokens_field=body.max_tokens_field,
        edits=await logit_edits(body, app_state.tokenizer),
        thinking=thoughts.rule,
    )
    (prompt_text,) = await builder.prompt_texts(prompts)
    requests = builder.build_requests(prompts, options)
    stream = builder.build_stream(requests, [0], make_parser, thoughts)
    shape = builder.shape(body.num_logprobs)
    answered = _counting(app_state, calling, make_parser)
    return ChatTurn(builder, stream, shape, prompt_text, answered)


def _counting(
    app_state: AppState, calling: Calling, make_parser: Callable[[], PartsParser]
) -> Callable[[], PartsParser]:
    """Return the parser of an answer; it counts parsed tool calls if the request has tools."""
    if calling.format is None:
        return make_parser
    return lambda: CountedParser(make_parser(), app_state.metrics.count_tool_parse)


async def count_tokens(
    app_state: AppState, body: ChatCompletionRequest, ignored: IgnoredFields
) -> int:
    """Return the length of the prompt of a chat, which may exceed the context.

    Raises InvalidRequestError.
    """
    app_state.check_model(body.model)
    reader = app_state.prompt_reader("messages")
    _, text = await _rendered(app_state, body, reader, ignored)
    reader.check_text(text)
    (ids,) = await app_state.tokenizer.encode([text], add_special_tokens=False)
    return len(ids)


async def _rendered(
    app_state: AppState, body: ChatCompletionRequest, reader: PromptReader, ignored: IgnoredFields
) -> tuple[Conversation, str]:
    """Return the conversation and the text of the prompt. reader: limits the template's input."""
    template = app_state.chat_template
    variables = switches(body.reasoning_effort, template.facts, app_state.reasoning_style)
    tools = app_state.tool_caller.shown(body)
    conversation = conversation_of(body, template.facts, ignored, tools, variables)
    conversation = app_state.tool_caller.with_tools_as_text(conversation)
    shown = [conversation.messages, conversation.documents, conversation.tools]
    reader.check_characters(num_characters(shown))
    return conversation, await template.render(conversation)


router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    app_state = app_state_of(request)
    tenant = tenant_of(request, app_state.config.tenant_by)
    ignored = IgnoredFields()
    fields = await read_fields(request, ignored)
    body = parse(ChatCompletionRequest, fields, CHAT_NEUTRAL, ignored)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs", "top_logprobs")
    turn = await build_chat_turn(
        app_state,
        body,
        id_prefix="chatcmpl-",
        tenant=tenant,
        key_name=key_name_of(request),
        ignored=ignored,
    )
    answer = ChatAnswer(turn.shape, turn.stream.streams[0], turn.prompt_text, turn.make_parser)
    await turn.stream.submit(request)
    return turn.builder.response(turn.stream, answer)
