"""The OpenAPI document at /openapi.json: what each route takes and answers, and with which key.

Owns one line for each operation. FastAPI knows the paths; the routes read their bodies themselves,
so it knows nothing of those, and this adds it from the models that the bodies are checked with.
A test asks that every documented route has a line here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api_server.http.middleware import OPEN_PATHS
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.messages.request import CountTokensRequest, MessagesRequest
from api_server.protocol.responses.request import ResponsesRequest
from api_server.protocol.tokenize import Detokenize, TokenizeChat, TokenizeText
from api_server.routes import admin
from proto.config import FrontEndConfig

# JSON Schemas of what the daemon answers, for the OpenAPI document.


Schema = dict[str, Any]

INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}


def an_object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """More fields than these may come with a later version."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def a_list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


IDS: Final = a_list(INTEGER)
USAGE: Final = an_object(
    {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER},
    {"prompt_tokens_details": an_object({"cached_tokens": INTEGER})},
)
_ENDING: Final = {
    "finish_reason": or_null(one_of("stop", "length", "tool_calls", "repetition", "abort")),
    "stop_reason": {"anyOf": [INTEGER, STRING, {"type": "null"}]},
}
COMPLETION: Final = an_object(
    {
        "id": STRING,
        "object": one_of("text_completion"),
        "created": INTEGER,
        "model": STRING,
        "choices": a_list(
            an_object(
                {"index": INTEGER, "text": STRING, **_ENDING},
                {"logprobs": or_null(an_object({"tokens": a_list(STRING)})), "token_ids": IDS},
            )
        ),
        "usage": USAGE,
    },
    {"kv_transfer_params": an_object({})},
)
_TOOL_CALL: Final = an_object(
    {
        "id": STRING,
        "type": one_of("function"),
        "function": an_object({"name": STRING, "arguments": STRING}),
    }
)
CHAT_COMPLETION: Final = an_object(
    {
        "id": STRING,
        "object": one_of("chat.completion"),
        "created": INTEGER,
        "model": STRING,
        "choices": a_list(
            an_object(
                {
                    "index": INTEGER,
                    "message": an_object(
                        {"role": STRING, "content": or_null(STRING)},
                        {"reasoning": STRING, "tool_calls": a_list(_TOOL_CALL)},
                    ),
                    **_ENDING,
                },
                {"logprobs": or_null(an_object({"content": a_list(an_object({}))}))},
            )
        ),
        "usage": USAGE,
    },
    {"kv_transfer_params": an_object({})},
)
RESPONSE: Final = an_object(
    {
        "id": STRING,
        "object": one_of("response"),
        "created_at": INTEGER,
        "status": one_of("in_progress", "completed", "incomplete", "cancelled", "failed"),
        "model": STRING,
        "output": a_list(an_object({"type": STRING, "id": STRING})),
        "tools": a_list(an_object({})),
        "usage": or_null(
            an_object(
                {
                    "input_tokens": INTEGER,
                    "input_tokens_details": an_object({"cached_tokens": INTEGER}),
                    "output_tokens": INTEGER,
                    "output_tokens_details": an_object({"reasoning_tokens": INTEGER}),
                    "total_tokens": INTEGER,
                }
            )
        ),
        "error": or_null(an_object({"code": STRING, "message": STRING})),
        "incomplete_details": or_null(an_object({"reason": STRING})),
    }
)
MESSAGE: Final = an_object(
    {
        "id": STRING,
        "type": one_of("message"),
        "role": one_of("assistant"),
        "model": STRING,
        "content": a_list(an_object({"type": one_of("text", "thinking", "tool_use")})),
        "stop_reason": STRING,
        "stop_sequence": or_null(STRING),
        "usage": an_object(
            {
                "input_tokens": INTEGER,
                "cache_creation_input_tokens": INTEGER,
                "cache_read_input_tokens": INTEGER,
                "output_tokens": INTEGER,
            }
        ),
    }
)
MESSAGE_ERROR: Final = an_object(
    {
        "type": one_of("error"),
        "error": an_object({"type": STRING, "message": STRING}),
        "request_id": STRING,
    }
)
MODEL_CARD: Final = an_object(
    {
        "id": STRING,
        "object": one_of("model"),
        "created": INTEGER,
        "owned_by": STRING,
        "root": STRING,
        "parent": {"type": "null"},
        "max_model_len": INTEGER,
    }
)
MODELS: Final = an_object({"object": one_of("list"), "data": a_list(MODEL_CARD)})
TOKENS: Final = an_object(
    {
        "count": INTEGER,
        "max_model_len": INTEGER,
        "tokens": IDS,
        "token_strs": or_null(a_list(or_null(STRING))),
    }
)
EVENT: Final = an_object({"data": STRING})
"""Of a stream: JSON in a string, or [DONE]."""
TEXT: Final = an_object({"prompt": STRING})
ERROR: Final = an_object(
    {
        "error": an_object(
            {"message": STRING, "type": STRING, "param": or_null(STRING), "code": INTEGER}
        )
    }
)
READINESS: Final = an_object({"ready": BOOLEAN, "reasons": a_list(STRING)})


_REFS: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@dataclass(frozen=True)
class Operation:
    """bodies: models of which the body is one. answers: content type → schema of a success.

    status: of a success. query: parameter → schema. failure: other answers have this body;
    unready: 503 has this one where it is another.
    """

    bodies: Sequence[type[BaseModel]] = ()
    answers: dict[str, Schema] = field(default_factory=dict)
    status: int = 200
    query: dict[str, Schema] = field(default_factory=dict)
    failure: Schema | None = None
    unready: Schema | None = None


def _answers(schema: Schema) -> dict[str, Schema]:
    return {_JSON: schema}


_STATUS: Final = an_object({"status": STRING})
_TRUTH: Final = one_of("true", "false", "1", "0")
OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("/v1/completions", "post"): Operation(
        (CompletionRequest,), {_JSON: COMPLETION, _EVENTS: EVENT}
    ),
    ("/v1/chat/completions", "post"): Operation(
        (ChatCompletionRequest,), {_JSON: CHAT_COMPLETION, _EVENTS: EVENT}
    ),
    ("/v1/responses", "post"): Operation((ResponsesRequest,), {_JSON: RESPONSE, _EVENTS: EVENT}),
    ("/v1/responses/{response_id}", "get"): Operation(answers=_answers(RESPONSE)),
    ("/v1/responses/{response_id}", "delete"): Operation(
        answers=_answers(an_object({"id": STRING, "object": STRING, "deleted": BOOLEAN}))
    ),
    ("/v1/responses/{response_id}/cancel", "post"): Operation(answers=_answers(RESPONSE)),
    ("/v1/messages", "post"): Operation(
        (MessagesRequest,), {_JSON: MESSAGE, _EVENTS: EVENT}, failure=MESSAGE_ERROR
    ),
    ("/v1/messages/count_tokens", "post"): Operation(
        (CountTokensRequest,), _answers(an_object({"input_tokens": INTEGER})), failure=MESSAGE_ERROR
    ),
    ("/v1/models", "get"): Operation(answers=_answers(MODELS)),
    ("/v1/models/{name}", "get"): Operation(answers=_answers(MODEL_CARD)),
    ("/tokenize", "post"): Operation((TokenizeText, TokenizeChat), _answers(TOKENS)),
    ("/detokenize", "post"): Operation((Detokenize,), _answers(TEXT)),
    ("/tokenizer_info", "get"): Operation(answers=_answers(an_object({"tokenizer_class": STRING}))),
    ("/health", "get"): Operation(),
    ("/ping", "get"): Operation(),
    ("/ping", "post"): Operation(),
    ("/health/live", "get"): Operation(),
    ("/health/ready", "get"): Operation(answers=_answers(READINESS), unready=READINESS),
    ("/version", "get"): Operation(answers=_answers(an_object({"version": STRING}))),
    ("/load", "get"): Operation(answers=_answers(an_object({"server_load": INTEGER}))),
    ("/metrics", "get"): Operation(answers={"text/plain": STRING}),
    ("/admin/drain", "post"): Operation(answers=_answers(_STATUS), status=202),
    ("/pause", "post"): Operation(
        answers=_answers(_STATUS),
        query={"mode": one_of("wait", "keep"), "clear_cache": one_of("false", "0")},
    ),
    ("/resume", "post"): Operation(answers=_answers(_STATUS)),
    ("/is_paused", "get"): Operation(answers=_answers(an_object({"is_paused": BOOLEAN}))),
    ("/reset_prefix_cache", "post"): Operation(
        query={"reset_running_requests": _TRUTH, "reset_external": _TRUTH}
    ),
    ("/abort_requests", "post"): Operation((admin.AbortBody,), _answers(_STATUS), status=202),
    ("/server_info", "get"): Operation(
        answers=_answers(an_object({name: an_object({}) for name in ("model", "engine", "config")}))
    ),
}


def install(app: FastAPI, config: FrontEndConfig) -> None:
    """Have the application answer with this document, which is made when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, config)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, config: FrontEndConfig) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Schema] = {"Error": ERROR}
    document["components"] = {"schemas": schemas, "securitySchemes": _SCHEMES}
    admin_paths = {route.path for route in admin.router.routes if hasattr(route, "path")}
    open_paths = OPEN_PATHS | ({"/metrics"} if config.metrics_open else set())
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            operation = OPERATIONS.get((path, method), Operation())
            _describe(described, operation, schemas)
            takes_key = config.has_client_keys and path not in open_paths
            if takes_key or (config.has_admin_keys and path in admin_paths):
                described["security"] = [{name: []} for name in _SCHEMES]
    return document


def _describe(described: dict[str, Any], operation: Operation, schemas: dict[str, Schema]) -> None:
    if operation.bodies:
        refs = [{"$ref": _add(each, schemas)} for each in operation.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    described.setdefault("parameters", []).extend(
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in operation.query.items()
    )
    success: dict[str, Any] = {"description": "Success"}
    if operation.answers:
        success["content"] = {kind: {"schema": each} for kind, each in operation.answers.items()}
    told = operation.failure or {"$ref": _REFS.format(model="Error")}
    failure = {_JSON: {"schema": told}}
    described["responses"] = {
        str(operation.status): success,
        "4XX": {"description": "The request is at fault", "content": failure},
        "503": {
            "description": "Not now; Retry-After says when to come again",
            "content": {_JSON: {"schema": operation.unready or operation.failure or ERROR}},
        },
        "5XX": {"description": "The daemon is at fault", "content": failure},
    }


def _add(model: type[BaseModel], schemas: dict[str, Schema]) -> str:
    """A reference to the schema of a body.

    A field that is null counts as not given, and one that no API defines is ignored.
    """
    schema = model.model_json_schema(ref_template=_REFS)
    found = {**schema.pop("$defs", {}), model.__name__: schema}
    for each in found.values():
        each.pop("additionalProperties", None)
        for name in each.get("properties", {}).keys() - each.get("required", []):
            each["properties"][name] = or_null(each["properties"][name])
    schemas.update(found)
    return _REFS.format(model=model.__name__)
