"""POST /v1/chat/completions and its /render, and the chat turn that other APIs share.

`create_chat_completion` is the handler; `build_chat_turn` goes from messages to engine requests.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.generation.app_state import RequestContext
from api_server.generation.encoders.base import ResponseOptions
from api_server.generation.encoders.chat import ChatEncoder
from api_server.generation.request_builder import RequestBuilder, check_thoughts
from api_server.generation.sampling import EndpointOptions
from api_server.generation.stream import TokenStream
from api_server.media.reader import ImageSource
from api_server.parsers.output import ChoiceParser
from api_server.parsers.output_format import OutputFormat, plan_reasoning, reasoning_variables
from api_server.parsers.tool_calls import TEXT_ONLY, ToolCallPlan
from api_server.protocol.chat import ChatCompletionRequest, ConversationFields, Effort
from api_server.protocol.chat_translation import ChatTranslation
from api_server.protocol.fields import CHAT_NEUTRAL
from api_server.protocol.json_schema import SchemaWork, write_grammar
from api_server.routes.common import read_request
from api_server.text.chat_prompt import build_conversation, num_characters
from api_server.text.chat_template import Conversation, TemplateError
from api_server.text.prompts import Prompt, PromptReader
from api_server.turns import run_for_body
from proto.errors import InvalidRequestError
from proto.messages.grammar import GrammarSource

RESERVED_CONTEXT_SHARE: Final = 4
"""A truncated prompt leaves 1/4 of the context to an answer without max_tokens."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One answer to a chat: its token stream, and what encodes its output.

    prompt_text: None if not requested. choice_parsers: one for each choice.
    """

    builder: RequestBuilder
    stream: TokenStream
    options: ResponseOptions
    prompt_text: str | None
    choice_parsers: Sequence[ChoiceParser]


async def build_chat_turn(
    context: RequestContext,
    body: ChatCompletionRequest,
    id_prefix: str,
    *,
    default_max_tokens: int | None = None,
    reserves_context: bool = False,
) -> ChatTurn:
    """Build the engine request of a chat and its token stream; `TokenStream.submit` sends it.

    id_prefix: of the response's id. default_max_tokens: limited by the context.
    reserves_context: a truncated prompt leaves a share of the context to an answer without
    max_tokens. Raises InvalidRequestError.
    """
    app_state, ignored = context.app_state, context.ignored
    harmony = app_state.harmony
    template = app_state.template_for(body.tools, body.tool_choice)

    def plan_answer(work: SchemaWork) -> tuple[ToolCallPlan, GrammarSource | None]:
        text_grammar = body.grammar_source(ignored, work)
        if harmony is not None:
            grammar = harmony.answer_grammar(body, text_grammar, ignored, work)
            return TEXT_ONLY, grammar
        plan = app_state.tool_calls(template).plan(body, text_grammar, ignored, work)
        return plan, plan.grammar

    tool_calls, grammar = await write_grammar(plan_answer)
    builder = RequestBuilder(context, body, id_prefix, grammar)
    if default_max_tokens is None:
        default_max_tokens = app_state.generation_defaults.max_tokens
    max_tokens = body.requested_max_tokens
    if max_tokens is None and reserves_context:
        share = app_state.client.engine.max_model_len // RESERVED_CONTEXT_SHARE
        max_tokens = share if default_max_tokens is None else min(default_max_tokens, share)
    reader = builder.prompt_reader("messages", max_tokens)
    rendered = await render_prompt(context, body, reader, body.reasoning_effort)
    if harmony is not None:
        output_format: OutputFormat = harmony.output_format(body, rendered.text)
    else:
        reasoning = await plan_reasoning(
            app_state.reasoning_format(template),
            app_state.tokenizer,
            rendered.conversation,
            rendered.text,
            budget=body.thinking_token_budget,
            has_grammar=builder.has_grammar,
            is_shown=body.include_reasoning,
        )
        output_format = OutputFormat(tool_calls, reasoning)
    rule = output_format.reasoning.rule
    check_thoughts(body, rule)
    options = EndpointOptions(
        max_tokens=body.requested_max_tokens,
        default_max_tokens=default_max_tokens,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        max_tokens_field=body.max_tokens_field,
        thinking=rule,
    )
    with ExitStack() as leases:
        prompts = [await _read_prompt(context, rendered, reader, body.cache_salt, leases)]
        stream = await builder.build_stream(prompts, options, output_format)
        (prompt_text,) = await builder.prompt_texts(prompts)
        stream.cleanup.callback(leases.pop_all().close)
    if rendered.images:
        builder.drop_messages()
    parsers = [output_format.new_choice_parser(app_state.metrics) for _ in range(body.n)]
    stream.choice_parsers = parsers
    response_options = builder.response_options(body.num_logprobs)
    return ChatTurn(builder, stream, response_options, prompt_text, parsers)


async def with_merged_roles_fallback(
    translation: ChatTranslation, make: Callable[[ChatCompletionRequest], Awaitable[Made]]
) -> Made:
    """Return what `make` returns for a translated request.

    If the chat template refuses the messages, `make` is called again with merged roles, which
    may help. Raises InvalidRequestError in the client's terms.
    """
    chat = await run_for_body(translation.chat_request)
    try:
        try:
            made = await make(chat)
        except TemplateError:
            merged = await run_for_body(translation.chat_request, merge_roles=True)
            if merged == chat:
                raise
            made = await make(merged)
    except InvalidRequestError as error:
        raise translation.translate_error(error) from None
    translation.translate_ignored()
    translation.drop_request()
    return made


async def count_tokens(context: RequestContext, body: ChatCompletionRequest) -> int:
    """Return the number of prompt tokens of a chat, which may exceed the context.

    Raises InvalidRequestError.
    """
    context.check_model(body.model)
    reader = context.app_state.prompt_reader("messages")
    rendered = await render_prompt(context, body, reader, body.reasoning_effort)
    return len(await encode_any_length(context, rendered, reader, body.cache_salt))


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What the chat template has made of a conversation.

    text: with a placeholder for each image. images: in the order of their placeholders.
    """

    conversation: Conversation
    text: str
    images: Sequence[ImageSource] = ()


async def _read_prompt(
    context: RequestContext,
    rendered: RenderedPrompt,
    reader: PromptReader,
    salt: str | None,
    leases: ExitStack,
) -> Prompt:
    """Return the prompt, with its images. leases: as of `ImageInput.load`."""
    images = context.app_state.images
    if not rendered.images or images is None:
        (prompt,) = await reader.encode_texts([rendered.text], add_special_tokens=False)
        return prompt
    loaded = await images.load(rendered.images, context.tenant, salt, leases)
    expanded = images.expand(rendered.text, loaded)
    prompt = await reader.encode_with_images(rendered.text, expanded)
    return replace(prompt, mm_features=images.features(prompt.token_ids, loaded))


async def encode_any_length(
    context: RequestContext,
    rendered: RenderedPrompt,
    reader: PromptReader,
    salt: str | None = None,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Return the token ids of a prompt that may exceed the context, those of its images too."""
    images, expanded = context.app_state.images, None
    with ExitStack() as leases:
        if rendered.images and images is not None:
            loaded = await images.load(rendered.images, context.tenant, salt, leases)
            expanded = images.expand(rendered.text, loaded)
    return await reader.encode_any_length(
        rendered.text, add_special_tokens=add_special_tokens, expanded=expanded
    )


async def render_prompt(
    context: RequestContext,
    body: ConversationFields,
    reader: PromptReader,
    effort: Effort | None = None,
) -> RenderedPrompt:
    """Return the conversation and the text of its prompt.

    If the template refuses or leaves out images in results of tools, they are rendered as texts.
    reader: limits the template's input. effort: of the reasoning. Raises InvalidRequestError.
    """
    app_state, ignored, images = context.app_state, context.ignored, context.app_state.images
    template = app_state.template_for(body.tools, body.tool_choice)

    def build(*, joins_results: bool = False) -> Conversation:
        reasoning = app_state.reasoning_format(template)
        variables = reasoning_variables(effort, template.facts, reasoning, ignored)
        tool_calls = app_state.tool_calls(template)
        tools = tool_calls.template_tools(body)
        conversation = build_conversation(
            body,
            template.facts,
            ignored,
            tools,
            variables,
            image_placeholder="" if images is None else images.placeholder,
            joins_results=joins_results,
        )
        conversation = tool_calls.adapt_conversation(conversation)
        template_input = [
            conversation.messages,
            conversation.documents,
            conversation.tools,
            conversation.variables,
        ]
        reader.check_conversation(num_characters(template_input))
        return conversation

    sources = [] if images is None else await run_for_body(images.find_sources, body)
    conversation = await run_for_body(build)
    if images is None or not sources:
        return RenderedPrompt(conversation, await template.render(conversation))
    may_join = any(message.is_result and message.has_images for message in body.messages)
    text = ""
    try:
        text = await template.render(conversation)
    except TemplateError:
        if not may_join:
            raise
    if may_join and not images.is_rendered(text, sources):
        conversation = await run_for_body(build, joins_results=True)
        text = await template.render(conversation)
    if not images.is_rendered(text, sources):
        raise images.not_rendered(body.messages, text, sources)
    return RenderedPrompt(conversation, text, sources)


router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    turn = await _build_turn(RequestContext(request))
    encoder = ChatEncoder(
        turn.options, turn.stream.streams[0], turn.prompt_text, turn.choice_parsers
    )
    await turn.stream.submit(request)
    return turn.builder.response(turn.stream, encoder)


@router.post("/v1/chat/completions/render")
async def render_chat_completion(request: Request) -> Response:
    """Return the prompt's token ids and sampling parameters, as vLLM does; nothing is computed."""
    turn = await _build_turn(RequestContext(request))
    return turn.builder.render_response(turn.stream)


async def _build_turn(context: RequestContext) -> ChatTurn:
    context.app_state.check_generates("Chat Completions API")
    body = await read_request(context, ChatCompletionRequest, CHAT_NEUTRAL)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs", "top_logprobs")
    return await build_chat_turn(context, body, "chatcmpl-")
