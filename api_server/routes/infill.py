"""POST /infill: llama.cpp's endpoint for filling in the middle of a text."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.generation.app_state import AppState, RequestContext
from api_server.generation.encoders.infill import InfillEncoder
from api_server.generation.request_builder import RequestBuilder
from api_server.generation.sampling import EndpointOptions
from api_server.generation.stream import TokenStream
from api_server.parsers.output_format import OutputFormat
from api_server.protocol.infill import InfillRequest, parse_infill
from api_server.protocol.structured import text_grammar
from api_server.routes.common import read_fields
from api_server.text.infill import NAME_TEXTS, window_shares
from api_server.text.prompts import Prompt, PromptReader
from api_server.text.tokenizer import Side, Truncation
from proto.messages.engine_io import EngineCoreRequest

router = APIRouter()


@router.post("/infill")
async def create_infill(request: Request) -> Response:
    context = RequestContext(request)
    app_state = context.app_state
    app_state.check_generates("filling in")
    fields = await read_fields(context, parse_infill)
    app_state.tokenizer.infill.check("input_suffix")
    body = fields.as_completion(app_state.generation_defaults.values)
    grammar = await text_grammar(body, context.ignored)
    builder = RequestBuilder(context, body, "infill-", grammar)
    stream, encoder = await _build(app_state, builder, fields)
    await stream.submit(request)
    return builder.response(stream, encoder)


async def _build(
    app_state: AppState, builder: RequestBuilder, fields: InfillRequest
) -> tuple[TokenStream, InfillEncoder]:
    """Return the stream of a request, and what encodes its output; InvalidRequestError."""
    prompt = await _read_prompt(app_state, fields)
    room = app_state.client.engine.max_model_len - len(prompt.token_ids)
    options = EndpointOptions(
        max_tokens=None if fields.n_predict < 0 else min(max(fields.n_predict, 1), room),
        default_max_tokens=None,
        logprobs=fields.n_probs or None,
        prompt_logprobs=None,
        max_tokens_field="n_predict",
        more_end_ids=app_state.tokenizer.infill.end_ids,
    )
    stream = await builder.build_stream([prompt], options, OutputFormat())
    await builder.check_prompt_texts([prompt], "input_prefix")
    text = await app_state.tokenizer.run_in_thread_if_large(
        len(prompt.token_ids),
        app_state.tokenizer.decode,
        prompt.token_ids,
        skip_special_tokens=False,
    )
    encoder = InfillEncoder(
        builder.response_options(options.logprobs),
        fields,
        stream.streams[0],
        text,
        _settings(fields, stream.requests[0], app_state),
        app_state.client.engine.max_model_len,
    )
    return stream, encoder


async def _read_prompt(app_state: AppState, fields: InfillRequest) -> Prompt:
    """Return the prompt of a request; raise InvalidRequestError if it is too long."""
    tokenizer, context = app_state.tokenizer, app_state.client.engine.max_model_len
    most_before, most_after = window_shares(context)

    def reader(field: str, kept: int, end: Side = "left") -> PromptReader:
        return app_state.prompt_reader(field).with_truncation(Truncation(kept, end))

    extra = reader("input_extra", context)
    files: list[tuple[list[int], list[int]]] = []
    num_tokens = 0
    for file in reversed(fields.input_extra):
        if num_tokens >= context:
            break  # the end of the files is kept
        name = await extra.encode_verbatim(f"{file.filename}\n")
        files.insert(0, (name, await extra.encode_verbatim(file.text)))
        num_tokens += sum(map(len, files[0]))
    written = await app_state.prompt_reader("prompt").encode_texts(
        [fields.prompt] if fields.prompt else [], add_special_tokens=False
    )
    ids = tokenizer.infill.project_prompt(
        await reader("input_prefix", most_before).encode_verbatim(fields.input_prefix),
        await reader("input_suffix", most_after, "right").encode_verbatim(fields.input_suffix),
        files,
        [await extra.encode_verbatim(text) for text in NAME_TEXTS],
        start=await tokenizer.start_ids(),
        written=[token_id for prompt in written for token_id in prompt.token_ids],
        suffix_first=app_state.config.spm_infill,
        context=context,
        num_output_tokens=max(fields.n_predict, 0),
    )
    (prompt,) = await app_state.prompt_reader("prompt").check_prompts([ids])
    return prompt


def _settings(
    fields: InfillRequest, request: EngineCoreRequest, app_state: AppState
) -> dict[str, object]:
    """Return `generation_settings` of the response: the values that hold for the request."""
    params = request.sampling_params
    return {
        "n_ctx": app_state.client.engine.max_model_len,
        "seed": request.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "stop": list(fields.stop),
        "max_tokens": fields.n_predict,
        "n_predict": fields.n_predict,
        "ignore_eos": params.ignore_eos,
        "stream": fields.stream,
        "n_probs": fields.n_probs,
    }
