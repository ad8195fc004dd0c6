"""POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.app_state import AppState
from api_server.parsers.output_format import OutputFormat
from api_server.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionEncoder,
    CompletionRequest,
    Echo,
)
from api_server.protocol.fields import COMPLETION_NEUTRAL, IgnoredFields
from api_server.protocol.json_lark import with_exact_numbers
from api_server.protocol.json_schema import write_grammar
from api_server.request_builder import EndpointOptions, RequestBuilder, prompt_text
from api_server.routes.common import app_state_of, read_request
from api_server.sampling import logit_edits
from api_server.text.prompts import Prompt, PromptReader, num_prompts
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError
from proto.logit_edits import LogitEdits

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    app_state = app_state_of(request)
    app_state.check_generates("Completions API")
    reader = app_state.prompt_reader("prompt")
    ignored = IgnoredFields()
    body = await read_request(request, ignored, CompletionRequest, COMPLETION_NEUTRAL)
    grammar = await write_grammar(
        lambda work: with_exact_numbers(body.grammar_source(ignored, work), work)
    )
    builder = RequestBuilder(app_state, request, body, ignored, "cmpl-", grammar)
    builder.check_choices(num_prompts(body.prompt))
    reader = reader.with_truncation(builder.truncation(body.max_tokens))
    prompts, shown = await _read_prompts(app_state, body, reader)
    echoed = sum(len(prompt.token_ids) for prompt in shown) if body.echo else 0
    edits = await logit_edits(body, app_state.tokenizer, app_state.generation_defaults)
    ends = app_state.tokenizer.infill.end_ids if body.suffix else ()
    requests = builder.build_requests(prompts, _options(body, edits, ends))
    if body.echo:
        await builder.check_prompt_texts(shown, "echo")
    echoes = await app_state.tokenizer.run_in_thread_if_large(
        echoed, _echoes, body, shown, app_state.tokenizer
    )
    prompt_texts = await builder.prompt_texts(prompts)
    starts = [len(echo.text) for echo in echoes]
    stream = await builder.build_stream(requests, starts, OutputFormat())
    encoder = CompletionEncoder(
        builder.response_options(body.logprobs),
        stream.streams,
        echoes,
        prompt_texts,
        body.only_echoes,
    )
    await stream.submit(request)
    return builder.response(stream, encoder)


async def _read_prompts(
    app_state: AppState, body: CompletionRequest, reader: PromptReader
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts and what `echo` shows of them: with a suffix the texts before it.

    Raises InvalidRequestError.
    """
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


def _options(
    body: CompletionRequest, edits: LogitEdits | None, more_end_ids: tuple[int, ...]
) -> EndpointOptions:
    """Return the options of a body; an echo without output samples one token and drops it."""
    prompt_logprobs = [body.prompt_logprobs, body.logprobs if body.echo else None]
    requested = [number for number in prompt_logprobs if number is not None]
    return EndpointOptions(
        max_tokens=1 if body.only_echoes else body.requested_max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=max(requested) if requested else None,
        echoes_logprobs=body.echo and body.logprobs is not None,
        edits=edits,
        more_end_ids=more_end_ids,
    )


def _echoes(
    body: CompletionRequest, prompts: Sequence[Prompt], tokenizer: ModelTokenizer
) -> list[Echo]:
    return [_echo(body, prompt, tokenizer) for prompt in prompts]


def _echo(body: CompletionRequest, prompt: Prompt, tokenizer: ModelTokenizer) -> Echo:
    if not body.echo:
        return Echo()
    text = prompt_text(prompt, tokenizer)
    if body.logprobs is None:
        return Echo(text)
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
    offsets, length = [], 0
    for token_id in prompt.token_ids:
        offsets.append(length)
        length += len(detokenizer.decode_token(token_id))
    length += len(detokenizer.flush_text())
    added = length - len(text)  # of a first token that the tokenizer added
    return Echo(text, [max(0, offset - added) for offset in offsets])
