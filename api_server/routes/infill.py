"""POST /infill: llama.cpp's endpoint for filling in the middle of a text."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.app_state import AppState
from api_server.parsers.output_format import OutputFormat
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.infill import InfillEncoder, InfillRequest, parse_infill
from api_server.protocol.json_lark import with_exact_numbers
from api_server.protocol.json_schema import write_grammar
from api_server.request_builder import EndpointOptions, RequestBuilder
from api_server.routes.common import app_state_of, read_fields
from api_server.sampling import logit_edits
from api_server.text.infill import NAME_TEXTS, InfillNames, window_shares
from api_server.text.prompts import Prompt, PromptReader
from api_server.text.tokenizer import Side, Truncation
from proto.engine_io import EngineCoreRequest

router = APIRouter()


@router.post("/infill")
async def create_infill(request: Request) -> Response:
    app_state = app_state_of(request)
    app_state.check_generates("filling in")
    ignored = IgnoredFields()
    fields = await read_fields(request, ignored, partial(parse_infill, ignored=ignored))
    app_state.tokenizer.infill.check("input_suffix")
    body = fields.as_completion(app_state.generation_defaults.values)
    grammar = await write_grammar(
        lambda work: with_exact_numbers(body.grammar_source(ignored, work), work)
    )
    builder = RequestBuilder(app_state, request, body, ignored, "infill-", grammar)
    prompt = await _read_prompt(app_state, fields)
    room = app_state.client.engine.max_model_len - len(prompt.token_ids)
    options = EndpointOptions(
        max_tokens=None if fields.n_predict < 0 else min(max(fields.n_predict, 1), room),
        default_max_tokens=None,
        logprobs=fields.n_probs or None,
        prompt_logprobs=None,
        max_tokens_field="n_predict",
        edits=await logit_edits(body, app_state.tokenizer, app_state.generation_defaults),
        more_end_ids=app_state.tokenizer.infill.end_ids,
    )
    requests = builder.build_requests([prompt], options)
    await builder.check_prompt_texts([prompt], "input_prefix")
    text = await app_state.tokenizer.run_in_thread_if_large(
        len(prompt.token_ids),
        app_state.tokenizer.decode,
        prompt.token_ids,
        skip_special_tokens=False,
    )
    stream = await builder.build_stream(requests, [0], OutputFormat())
    encoder = InfillEncoder(
        builder.response_options(options.logprobs),
        fields,
        stream.streams[0],
        text,
        _settings(fields, requests[0], app_state),
        app_state.client.engine.max_model_len,
    )
    await stream.submit(request)
    return builder.response(stream, encoder)


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
        InfillNames(*[await extra.encode_verbatim(text) for text in NAME_TEXTS]),
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
