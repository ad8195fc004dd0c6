"""The OpenAPI document at /openapi.json: body, response and key of each route.

FastAPI adds the paths. The routes read their bodies themselves, so `OPERATIONS` adds the models
that validate the bodies; a test checks that every documented route has a line there.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api_server.http.access import HEALTH, OPERATORS
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.infill import InfillRequest
from api_server.protocol.messages.request import CountTokensRequest, MessagesRequest
from api_server.protocol.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from api_server.protocol.responses.compaction import CompactionRequest
from api_server.protocol.responses.request import ResponsesRequest
from api_server.protocol.schemas import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    Schema,
    a_list,
    an_object,
    one_of,
    or_null,
)
from api_server.routes import adapters, admin
from api_server.routes.tokenizer import Detokenize, TokenizeChat, TokenizeText
from proto.settings.config import FrontEndConfig
from proto.settings.field_texts import texts_below_fields

# JSON Schemas of the responses.


IDS: Final = a_list(INTEGER)
USAGE: Final = an_object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    optional={"prompt_tokens_details": an_object(cached_tokens=INTEGER)},
)
_ENDING: Final = {
    "finish_reason": or_null(one_of("stop", "length", "tool_calls", "repetition", "abort")),
    "stop_reason": {"anyOf": [INTEGER, STRING, {"type": "null"}]},
}


def _generated(object_name: str, choice: Schema) -> Schema:
    """Return the schema of a response with choices."""
    return an_object(
        id=STRING,
        object=one_of(object_name),
        created=INTEGER,
        model=STRING,
        choices=a_list(choice),
        usage=USAGE,
        optional={"kv_transfer_params": an_object()},
    )


COMPLETION: Final = _generated(
    "text_completion",
    an_object(
        index=INTEGER,
        text=STRING,
        **_ENDING,
        optional={"logprobs": or_null(an_object(tokens=a_list(STRING))), "token_ids": IDS},
    ),
)
_TOOL_CALL: Final = an_object(
    id=STRING, type=one_of("function"), function=an_object(name=STRING, arguments=STRING)
)
CHAT_COMPLETION: Final = _generated(
    "chat.completion",
    an_object(
        index=INTEGER,
        message=an_object(
            role=STRING,
            content=or_null(STRING),
            optional={"reasoning": STRING, "tool_calls": a_list(_TOOL_CALL)},
        ),
        **_ENDING,
        optional={"logprobs": or_null(an_object(content=a_list(an_object())))},
    ),
)
RENDERED: Final = an_object(
    request_id=STRING,
    model=STRING,
    token_ids=IDS,
    features=or_null(an_object(mm_hashes=an_object(), mm_placeholders=an_object())),
    sampling_params=an_object(max_tokens=INTEGER, temperature=NUMBER),
    stream=BOOLEAN,
    stream_options=or_null(an_object()),
    cache_salt=or_null(STRING),
    priority=INTEGER,
)
"""vLLM's GenerateRequest."""
INFILL: Final = an_object(
    optional={
        **dict.fromkeys(("index", "tokens_predicted", "tokens_evaluated"), INTEGER),
        **dict.fromkeys(("content", "model", "prompt", "stopping_word"), STRING),
        **dict.fromkeys(("stop", "has_new_line", "truncated"), BOOLEAN),
        "tokens": IDS,
        "tokens_cached": INTEGER,
        "stop_type": one_of("eos", "word", "limit"),
        "generation_settings": an_object(),
        "timings": {"type": "object", "additionalProperties": NUMBER},
        "completion_probabilities": a_list(an_object(id=INTEGER, logprob=NUMBER)),
    }
)
"""Every field is optional: `response_fields` chooses."""
RESPONSE_USAGE: Final = an_object(
    input_tokens=INTEGER,
    input_tokens_details=an_object(cached_tokens=INTEGER),
    output_tokens=INTEGER,
    output_tokens_details=an_object(reasoning_tokens=INTEGER),
    total_tokens=INTEGER,
)
_IGNORED: Final = {"ignored_fields": a_list(STRING)}
_ITEMS: Final = a_list(an_object(type=STRING, id=STRING))
RESPONSE: Final = an_object(
    id=STRING,
    object=one_of("response"),
    created_at=INTEGER,
    status=one_of("in_progress", "completed", "incomplete", "cancelled", "failed"),
    model=STRING,
    output=_ITEMS,
    tools=a_list(an_object()),
    usage=or_null(RESPONSE_USAGE),
    error=or_null(an_object(code=STRING, message=STRING)),
    incomplete_details=or_null(an_object(reason=STRING)),
    optional=_IGNORED,
)
COMPACTION: Final = an_object(
    id=STRING,
    object=one_of("response.compaction"),
    created_at=INTEGER,
    output=_ITEMS,
    usage=RESPONSE_USAGE,
)
INPUT_ITEMS: Final = an_object(
    object=one_of("list"),
    data=_ITEMS,
    first_id=or_null(STRING),
    last_id=or_null(STRING),
    has_more=BOOLEAN,
)
MESSAGE: Final = an_object(
    id=STRING,
    type=one_of("message"),
    role=one_of("assistant"),
    model=STRING,
    content=a_list(an_object(type=one_of("text", "thinking", "tool_use"))),
    stop_reason=STRING,
    stop_sequence=or_null(STRING),
    usage=an_object(
        input_tokens=INTEGER,
        cache_creation_input_tokens=INTEGER,
        cache_read_input_tokens=INTEGER,
        output_tokens=INTEGER,
    ),
    optional=_IGNORED,
)
MESSAGE_ERROR: Final = an_object(
    type=one_of("error"), error=an_object(type=STRING, message=STRING), request_id=STRING
)
MODEL_CARD: Final = an_object(
    id=STRING,
    object=one_of("model"),
    created=INTEGER,
    owned_by=STRING,
    root=STRING,
    parent=or_null(STRING),
    max_model_len=INTEGER,
    supported_tasks=a_list(STRING),
    input_modalities=a_list(one_of("text", "image")),
    default_sampling_params={"type": "object", "additionalProperties": NUMBER},
)
ANTHROPIC_MODEL: Final = an_object(
    type=one_of("model"),
    id=STRING,
    display_name=STRING,
    created_at=STRING,
    lifecycle=one_of("active"),
    max_input_tokens=INTEGER,
    max_tokens=INTEGER,
)
MODEL: Final = {"anyOf": [MODEL_CARD, ANTHROPIC_MODEL]}
MODELS: Final = {
    "anyOf": [
        an_object(object=one_of("list"), data=a_list(MODEL_CARD)),
        an_object(
            data=a_list(ANTHROPIC_MODEL),
            has_more=BOOLEAN,
            first_id=or_null(STRING),
            last_id=or_null(STRING),
        ),
    ]
}
TOKENS: Final = an_object(
    count=INTEGER, max_model_len=INTEGER, tokens=IDS, token_strs=or_null(a_list(or_null(STRING)))
)
_POOLING_USAGE: Final = an_object(prompt_tokens=INTEGER, total_tokens=INTEGER)


def _pooled(entry: Schema) -> Schema:
    """Return the schema of a response with an entry for each text."""
    return an_object(
        id=STRING,
        object=one_of("list"),
        created=INTEGER,
        model=STRING,
        data=a_list(entry),
        usage=_POOLING_USAGE,
    )


_NUMBERS: Final[Schema] = {"anyOf": [a_list(NUMBER), STRING]}
EMBEDDINGS: Final = _pooled(
    an_object(object=one_of("embedding"), index=INTEGER, embedding=_NUMBERS)
)
POOLED: Final = _pooled(
    an_object(
        object=one_of("pooling"),
        index=INTEGER,
        data={"anyOf": [a_list(NUMBER), a_list(a_list(NUMBER)), STRING]},
    )
)
CLASSES: Final = _pooled(
    an_object(index=INTEGER, label=or_null(STRING), probs=a_list(NUMBER), num_classes=INTEGER)
)
SCORES: Final = _pooled(an_object(object=one_of("score"), index=INTEGER, score=NUMBER))
RANKING: Final = an_object(
    id=STRING,
    model=STRING,
    results=a_list(
        an_object(
            index=INTEGER, relevance_score=NUMBER, optional={"document": an_object(text=STRING)}
        )
    ),
    usage=_POOLING_USAGE,
)
EVENT: Final = an_object(data=STRING)
"""An event of a stream: JSON in a string, or [DONE]."""
TEXT: Final = an_object(prompt=STRING)
ERROR: Final = an_object(
    error=an_object(
        message=STRING, type=STRING, param=or_null(STRING), code={"anyOf": [INTEGER, STRING]}
    )
)
READINESS: Final = an_object(ready=BOOLEAN, reasons=a_list(STRING))


_REFS: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@dataclass(frozen=True)
class Operation:
    """Body and responses of one method of one path.

    bodies: the body is one of these models. response: schema of a successful one, None if it has no
    body. streams: it may be server-sent events instead. status: if successful. query: parameter →
    schema. failure: schema of the other responses; unready: schema of a 503, if it is another.
    """

    bodies: Sequence[type[BaseModel]] = ()
    response: Schema | None = None
    streams: bool = False
    media_type: str = _JSON
    status: int = 200
    query: dict[str, Schema] = field(default_factory=dict)
    failure: Schema | None = None
    unready: Schema | None = None


_STATUS: Final = an_object(status=STRING)
_TRUTH: Final = one_of("true", "false", "1", "0")
OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("/v1/completions", "post"): Operation((CompletionRequest,), COMPLETION, streams=True),
    ("/v1/completions/render", "post"): Operation((CompletionRequest,), a_list(RENDERED)),
    ("/infill", "post"): Operation((InfillRequest,), INFILL, streams=True),
    ("/v1/chat/completions", "post"): Operation(
        (ChatCompletionRequest,), CHAT_COMPLETION, streams=True
    ),
    ("/v1/chat/completions/render", "post"): Operation((ChatCompletionRequest,), RENDERED),
    ("/v1/responses", "post"): Operation((ResponsesRequest,), RESPONSE, streams=True),
    ("/v1/responses/render", "post"): Operation((ResponsesRequest,), RENDERED),
    ("/v1/responses/input_tokens", "post"): Operation(
        (ResponsesRequest,), an_object(object=STRING, input_tokens=INTEGER)
    ),
    ("/v1/responses/compact", "post"): Operation((CompactionRequest,), COMPACTION),
    ("/v1/responses/{response_id}/input_items", "get"): Operation(
        response=INPUT_ITEMS,
        query={"limit": INTEGER, "order": one_of("asc", "desc"), "after": STRING},
    ),
    ("/v1/responses/{response_id}", "get"): Operation(response=RESPONSE),
    ("/v1/responses/{response_id}", "delete"): Operation(
        response=an_object(id=STRING, object=STRING, deleted=BOOLEAN)
    ),
    ("/v1/responses/{response_id}/cancel", "post"): Operation(response=RESPONSE),
    ("/v1/messages", "post"): Operation(
        (MessagesRequest,), MESSAGE, streams=True, failure=MESSAGE_ERROR
    ),
    ("/v1/messages/count_tokens", "post"): Operation(
        (CountTokensRequest,), an_object(input_tokens=INTEGER), failure=MESSAGE_ERROR
    ),
    ("/v1/embeddings", "post"): Operation((EmbeddingRequest,), EMBEDDINGS),
    ("/pooling", "post"): Operation((PoolingRequest,), POOLED),
    ("/classify", "post"): Operation((ClassificationRequest,), CLASSES),
    ("/score", "post"): Operation((ScoreRequest,), SCORES),
    ("/v1/score", "post"): Operation((ScoreRequest,), SCORES),
    ("/rerank", "post"): Operation((RerankRequest,), RANKING),
    ("/v1/rerank", "post"): Operation((RerankRequest,), RANKING),
    ("/v2/rerank", "post"): Operation((RerankRequest,), RANKING),
    ("/v1/models", "get"): Operation(
        response=MODELS, query={"limit": INTEGER, "after_id": STRING, "before_id": STRING}
    ),
    ("/v1/models/{name}", "get"): Operation(response=MODEL),
    ("/tokenize", "post"): Operation((TokenizeText, TokenizeChat), TOKENS),
    ("/detokenize", "post"): Operation((Detokenize,), TEXT),
    ("/tokenizer_info", "get"): Operation(response=an_object(tokenizer_class=STRING)),
    ("/health", "get"): Operation(),
    ("/ping", "get"): Operation(),
    ("/ping", "post"): Operation(),
    ("/health/live", "get"): Operation(),
    ("/health/ready", "get"): Operation(response=READINESS, unready=READINESS),
    ("/version", "get"): Operation(response=an_object(version=STRING)),
    ("/load", "get"): Operation(response=an_object(server_load=INTEGER)),
    ("/kv_event_sources", "get"): Operation(response=an_object()),
    ("/metrics", "get"): Operation(response=STRING, media_type="text/plain"),
    ("/admin/drain", "post"): Operation(response=_STATUS, status=202),
    ("/pause", "post"): Operation(
        response=_STATUS, query={"mode": one_of(*admin.PAUSES), "clear_cache": one_of("false", "0")}
    ),
    ("/resume", "post"): Operation(response=_STATUS),
    ("/is_paused", "get"): Operation(response=an_object(is_paused=BOOLEAN)),
    ("/reset_prefix_cache", "post"): Operation(
        query={"reset_running_requests": _TRUTH, "reset_external": _TRUTH}
    ),
    ("/reset_encoder_cache", "post"): Operation(),
    ("/start_profile", "post"): Operation(response=_STATUS),
    ("/stop_profile", "post"): Operation(response=an_object(status=STRING, files=a_list(STRING))),
    ("/abort_requests", "post"): Operation((admin.AbortBody,), _STATUS, status=202),
    ("/v1/load_lora_adapter", "post"): Operation(
        (adapters.LoadBody,), STRING, media_type="text/plain"
    ),
    ("/v1/unload_lora_adapter", "post"): Operation(
        (adapters.UnloadBody,), STRING, media_type="text/plain"
    ),
    ("/lora-adapters", "get"): Operation(
        response=a_list(an_object(id=INTEGER, path=STRING, scale=NUMBER))
    ),
    ("/lora-adapters", "post"): Operation(response=an_object(success=BOOLEAN)),
    ("/server_info", "get"): Operation(
        response=an_object(
            **{name: an_object() for name in ("model", "engine", "config", "vllm_config")}
        )
    ),
}


def install(app: FastAPI, config: FrontEndConfig) -> None:
    """Replace the application's OpenAPI document by ours, which is built on the first request.

    It has the sampling defaults of the model; a reload that changes them changes the document.
    """
    shown: Mapping[str, float] = {}

    def openapi() -> dict[str, Any]:
        nonlocal shown
        defaults = app.state.app_state.generation_defaults.values
        if app.openapi_schema is None or shown != defaults:
            app.openapi_schema, shown = _build_document(app, config, defaults), defaults
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _build_document(
    app: FastAPI, config: FrontEndConfig, defaults: Mapping[str, float]
) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Schema] = {"Error": ERROR}
    document["components"] = {"schemas": schemas, "securitySchemes": _SCHEMES}
    open_paths = {*HEALTH.paths, *(("/metrics",) if config.metrics_open else ())}
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            operation = OPERATIONS.get((path, method), Operation())
            _describe(described, operation, schemas, defaults)
            takes_key = config.has_client_keys and path not in open_paths
            if takes_key or (config.has_admin_keys and path in OPERATORS.paths):
                described["security"] = [{name: []} for name in _SCHEMES]
    return document


def _describe(
    described: dict[str, Any],
    operation: Operation,
    schemas: dict[str, Schema],
    defaults: Mapping[str, float],
) -> None:
    if operation.bodies:
        refs = [{"$ref": _add_schema(model, schemas, defaults)} for model in operation.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    described.setdefault("parameters", []).extend(
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in operation.query.items()
    )
    success: dict[str, Any] = {"description": "Success"}
    if operation.response is not None:
        success["content"] = {operation.media_type: {"schema": operation.response}}
    if operation.streams:
        success["content"][_EVENTS] = {"schema": EVENT}
    error = operation.failure or {"$ref": _REFS.format(model="Error")}
    failure = {_JSON: {"schema": error}}
    described["responses"] = {
        str(operation.status): success,
        "4XX": {"description": "The request is invalid or refused", "content": failure},
        "503": {
            "description": "Temporarily unavailable; Retry-After says when to retry",
            "content": {_JSON: {"schema": operation.unready or operation.failure or ERROR}},
        },
        "5XX": {"description": "An error of the daemon", "content": failure},
    }


def _add_schema(
    model: type[BaseModel], schemas: dict[str, Schema], defaults: Mapping[str, float]
) -> str:
    """Add the schema of a body to `schemas`, and return a reference to it.

    defaults: of the model; that of max_tokens holds where the endpoint itself has no default.
    Every optional field may be null, and unknown fields are ignored, so they are allowed.
    """
    schema = model.model_json_schema(ref_template=_REFS)
    found = {**schema.pop("$defs", {}), model.__name__: schema}
    for definition in found.values():
        definition.pop("additionalProperties", None)
        properties = definition.get("properties", {})
        for name in properties.keys() - definition.get("required", []):
            default = defaults.get("max_tokens" if name == "max_output_tokens" else name)
            has_own = name == "max_tokens" and properties[name]["default"] is not None
            if default is not None and not has_own:
                properties[name]["default"] = default
            properties[name] = or_null(properties[name])
    for name, text in field_texts(model).items():
        schema["properties"][name]["description"] = text
    schemas.update(found)
    return _REFS.format(model=model.__name__)


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the string literal under each field of a model and its base classes."""
    texts = {
        name: field.description for name, field in model.model_fields.items() if field.description
    }
    for base in model.__mro__[: model.__mro__.index(BaseModel)]:
        of_class = texts_below_fields(sys.modules[base.__module__]).get(base.__name__, {})
        texts = of_class | texts
    return texts
