"""POST /v1/completions and /v1/completions/render."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.generation.app_state import AppState, RequestContext
from api_server.generation.encoders.completions import CompletionEncoder, Echo
from api_server.generation.request_builder import RequestBuilder, prompt_text
from api_server.generation.sampling import EndpointOptions
from api_server.generation.stream import TokenStream
from api_server.parsers.output_format import OutputFormat
from api_server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from api_server.protocol.fields import COMPLETION_NEUTRAL
from api_server.protocol.structured import text_grammar
from api_server.routes.common import read_request
from api_server.text.prompts import Prompt, PromptReader, num_prompts, prompt_embeds
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError, require

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    builder, stream, encoder = await _build(RequestContext(request))
    await stream.submit(request)
    return builder.response(stream, encoder)


@router.post("/v1/completions/render")
async def render_completion(request: Request) -> Response:
    """Return each prompt's token ids and sampling parameters, as vLLM; nothing is computed."""
    builder, stream, _ = await _build(RequestContext(request))
    embeds = any(each.prompt_embeds for each in stream.requests)
    require(not embeds, "prompt_embeds", "has no token ids to render")
    return builder.render_response(stream, several=True)


async def _build(context: RequestContext) -> tuple[RequestBuilder, TokenStream, CompletionEncoder]:
    """Return what builds a completion, its stream, and what encodes its output.

    Raises InvalidRequestError.
    """
    app_state = context.app_state
    app_state.check_generates("Completions API")
    body = await read_request(context, CompletionRequest, COMPLETION_NEUTRAL)
    grammar = await text_grammar(body, context.ignored)
    builder = RequestBuilder(context, body, "cmpl-", grammar)
    given = body.prompt if body.prompt_embeds is None else body.prompt_embeds
    builder.check_choices(num_prompts(given))
    reader = builder.prompt_reader("prompt", body.max_tokens)
    prompts, shown = await _read_prompts(app_state, body, reader)
    ends = app_state.tokenizer.infill.end_ids if body.suffix else ()
    stream = await builder.build_stream(prompts, _options(body, ends), OutputFormat())
    encoder = CompletionEncoder(
        builder.response_options(body.logprobs),
        stream.streams,
        await _echoes(app_state.tokenizer, builder, body, shown),
        await builder.prompt_texts(prompts),
        body.only_echoes,
    )
    return builder, stream, encoder


async def _read_prompts(
    app_state: AppState, body: CompletionRequest, reader: PromptReader
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts and what `echo` shows of them: with a suffix the texts before it.

    Raises InvalidRequestError.
    """
    if body.prompt_embeds is not None:
        prompts = await _read_embeds(app_state, body, reader)
        return prompts, prompts
    if body.prompt is None:
        raise InvalidRequestError("prompt is missing", "prompt")
    if not body.suffix:
        prompts = await reader.read_prompts(body.prompt, add_special_tokens=body.add_special_tokens)
        return prompts, prompts
    tokenizer, infill = app_state.tokenizer, app_state.tokenizer.infill
    infill.check("suffix")
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError(
            "truncate_prompt_tokens cannot be combined with suffix", "truncate_prompt_tokens"
        )
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError("echo with logprobs cannot be combined with suffix", "echo")
    suffix = await replace(reader, field="suffix").encode_verbatim(body.suffix)
    before = await reader.read_parts(body.prompt)
    start = await tokenizer.start_ids() if body.add_special_tokens else []
    is_first = app_state.config.spm_infill
    prompts = await reader.check_prompts(
        infill.prompt(part.token_ids, suffix, start=start, suffix_first=is_first) for part in before
    )
    return prompts, before


async def _read_embeds(
    app_state: AppState, body: CompletionRequest, reader: PromptReader
) -> list[Prompt]:
    """Return the prompts that are given as embeddings. Raises InvalidRequestError."""
    model = app_state.settings.model
    require(
        model.enable_prompt_embeds, "prompt_embeds", "needs a server with --enable-prompt-embeds"
    )
    for is_used, name in (
        (body.prompt is not None, "prompt"),
        (body.echo, "echo"),
        (bool(body.suffix), "suffix"),
        (body.prompt_logprobs is not None, "prompt_logprobs"),
        (body.truncate_prompt_tokens is not None, "truncate_prompt_tokens"),
        (body.return_prompt_text, "return_prompt_text"),
        (body.return_token_ids, "return_token_ids"),
    ):
        require(not is_used, name, "does not go with prompt_embeds")
    texts = body.prompt_embeds
    texts = [texts] if isinstance(texts, str) else texts or []
    require(bool(texts), "prompt_embeds", "must not be empty")
    size = app_state.model.hidden_size
    found = [
        await app_state.tokenizer.run_in_thread_if_large(len(text), prompt_embeds, text, size)
        for text in texts
    ]
    prompts = await reader.check_prompts([0] * (len(rows) // (4 * size)) for rows in found)
    return [replace(prompt, embeds=rows) for prompt, rows in zip(prompts, found, strict=True)]


def _options(body: CompletionRequest, more_end_ids: tuple[int, ...]) -> EndpointOptions:
    """Return the options of a body; an echo without output samples one token and drops it."""
    prompt_logprobs = [body.prompt_logprobs, body.logprobs if body.echo else None]
    requested = [number for number in prompt_logprobs if number is not None]
    return EndpointOptions(
        max_tokens=1 if body.only_echoes else body.requested_max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=max(requested) if requested else None,
        echoes_logprobs=body.echo and body.logprobs is not None,
        more_end_ids=more_end_ids,
    )


async def _echoes(
    tokenizer: ModelTokenizer,
    builder: RequestBuilder,
    body: CompletionRequest,
    prompts: Sequence[Prompt],
) -> list[Echo]:
    """Return what each choice begins with, by prompt. Raises InvalidRequestError if it is long."""
    if not body.echo:
        return [Echo()] * len(prompts)
    await builder.check_prompt_texts(prompts, "echo")
    has_offsets = body.logprobs is not None

    def echoes() -> list[Echo]:
        return [_echo(prompt, tokenizer, has_offsets) for prompt in prompts]

    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return await tokenizer.run_in_thread_if_large(num_tokens, echoes)


def _echo(prompt: Prompt, tokenizer: ModelTokenizer, has_offsets: bool) -> Echo:
    text = prompt_text(prompt, tokenizer)
    if not has_offsets:
        return Echo(text)
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
    offsets, length = [], 0
    for token_id in prompt.token_ids:
        offsets.append(length)
        length += len(detokenizer.decode_token(token_id))
    length += len(detokenizer.flush_text())
    added = length - len(text)  # of a first token that the tokenizer added
    return Echo(text, [max(0, offset - added) for offset in offsets])
