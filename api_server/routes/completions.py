"""POST /v1/completions."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.inputs.prompts import Prompt, num_prompts
from api_server.inputs.tokenizer import ModelTokenizer
from api_server.protocol.answers import CompletionAnswer, Echo
from api_server.protocol.completion import (
    COMPLETION_LATER,
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
)
from api_server.protocol.fields import parse
from api_server.routes.access import services_of
from api_server.routes.body import read_fields
from api_server.routes.prepare import Preparation, Wishes
from api_server.routes.respond import GenerationResponse
from api_server.tenants import key_name_of, tenant_of

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    services = services_of(request)
    tenant = tenant_of(request, services.config.tenant_by)
    reader = services.prompt_reader("prompt")
    asked = parse(CompletionRequest, await read_fields(request), COMPLETION_LATER)
    preparation = Preparation(services, asked, "cmpl-", tenant, key_name_of(request))
    preparation.check_choices(num_prompts(asked.prompt))
    prompts = await reader.read(asked.prompt, add_special_tokens=asked.add_special_tokens)
    echoed = sum(len(prompt.token_ids) for prompt in prompts) if asked.echo else 0
    requests = preparation.requests(prompts, _wishes(asked))
    echoes = await services.tokenizer.apart(echoed, _echoes, asked, prompts, services.tokenizer)
    generation = preparation.generation(requests, [len(echo.text) for echo in echoes])
    answer = CompletionAnswer(
        preparation.shape(asked.logprobs), generation.streams, echoes, asked.only_echoes
    )
    keep_alive = services.config.sse_keep_alive
    return GenerationResponse(generation, answer, stream=asked.stream, keep_alive=keep_alive)


def _wishes(asked: CompletionRequest) -> Wishes:
    """The engine always draws a token: an echo alone asks for one and drops it."""
    prompt_logprobs = [asked.prompt_logprobs, asked.logprobs if asked.echo else None]
    given = [number for number in prompt_logprobs if number is not None]
    return Wishes(
        max_tokens=1 if asked.only_echoes else asked.wanted_max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=asked.logprobs,
        prompt_logprobs=max(given) if given else None,
    )


def _echoes(
    asked: CompletionRequest, prompts: Sequence[Prompt], tokenizer: ModelTokenizer
) -> list[Echo]:
    return [_echo(asked, prompt, tokenizer) for prompt in prompts]


def _echo(asked: CompletionRequest, prompt: Prompt, tokenizer: ModelTokenizer) -> Echo:
    if not asked.echo:
        return Echo()
    if asked.logprobs is None:
        return Echo(_text(prompt, tokenizer))
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
    offsets, length = [], 0
    for token_id in prompt.token_ids:
        offsets.append(length)
        length += len(detokenizer.feed(token_id))
    length += len(detokenizer.flush())
    text = _text(prompt, tokenizer)
    added = length - len(text)  # a first token that the tokenizer put there
    return Echo(text, [max(0, offset - added) for offset in offsets])


def _text(prompt: Prompt, tokenizer: ModelTokenizer) -> str:
    """What the client sent, or what its token ids say."""
    if prompt.text is None:
        return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    return prompt.text
