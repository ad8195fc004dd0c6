"""The tables of request fields in docs/api.md, generated from the request models.

The texts are those of the OpenAPI document.
"""

import json
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.chat_translation import PASSED as PASSED_BY_MESSAGES
from api_server.protocol.common import GenerationRequest
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.fields import (
    ANTHROPIC,
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    ENDPOINTS,
    HARMLESS,
    LLAMA_CPP_NEUTRAL,
    OPENAI,
    SGLANG_NEUTRAL,
    VLLM,
)
from api_server.protocol.infill import InfillRequest
from api_server.protocol.messages.request import MessagesRequest
from api_server.protocol.pooling import (
    ClassificationRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from api_server.protocol.responses.request import PASSED, ResponsesRequest
from api_server.routes.openapi import field_texts

_NO_DEFAULT = "required"


def markdown() -> str:
    """Return the fields of all requests by endpoint, and those that are refused or ignored."""
    shared = set(GenerationRequest.model_fields)
    parts = [
        "## Fields of both endpoints",
        _table(GenerationRequest, set()),
        "## Fields of /v1/completions",
        _table(CompletionRequest, shared),
        "## Fields of /infill",
        _table(InfillRequest, set()),
        "llama.cpp's fields that tokend does not have, refused unless they ask for nothing: "
        f"{_names(LLAMA_CPP_NEUTRAL.keys())}.",
        "## Fields of /v1/chat/completions",
        _table(ChatCompletionRequest, shared),
        "## Fields of /v1/responses",
        _table(ResponsesRequest, set()),
        _as_in_a_chat(PASSED),
        "## Fields of /v1/messages",
        _table(MessagesRequest, set()),
        _as_in_a_chat(PASSED_BY_MESSAGES),
        "## Fields of the pooling endpoints",
        _table(PoolingFields, set()),
        "### /v1/embeddings and /pooling",
        "`task` only for /pooling.",
        _table(PoolingRequest, set(PoolingFields.model_fields)),
        "### /classify",
        _table(ClassificationRequest, set(PoolingFields.model_fields)),
        "### /score and /v1/score",
        _table(ScoreRequest, set(PoolingFields.model_fields)),
        "### /rerank, /v1/rerank and /v2/rerank",
        _table(RerankRequest, set(PoolingFields.model_fields)),
        "## Fields without effect",
        f"Taken and not looked at: {_names(HARMLESS)}.",
        "Refused by name wherever an endpoint has no such field, unless the value asks for nothing "
        "(null, or in completions and chats what is in brackets):",
        "\n".join(
            f"- {api}: {_names(names)}."
            for api, names in (
                ("OpenAI", OPENAI),
                ("Anthropic", ANTHROPIC),
                ("vLLM", VLLM),
                ("SGLang, in completions and chats", SGLANG_NEUTRAL.keys()),
                ("Of completions", ENDPOINTS & CHAT_NEUTRAL.keys()),
            )
        ),
    ]
    return "\n\n".join(parts)


def _as_in_a_chat(names: frozenset[str]) -> str:
    return "As in a chat completion: " + ", ".join(f"`{name}`" for name in sorted(names)) + "."


def _table(model: type[BaseModel], excluded: set[str]) -> str:
    texts = field_texts(model)
    rows = [
        f"| `{name}` | {_default(field)} | {texts[name]} |"
        for name, field in model.model_fields.items()
        if name not in excluded
    ]
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *rows])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return _NO_DEFAULT
    value: Any = field.default
    return "" if value is None or value in ([], {}) else f"`{json.dumps(value)}`"


def _names(names: frozenset[str]) -> str:
    return ", ".join(f"`{name}`{_neutral(name)}" for name in sorted(names))


def _neutral(name: str) -> str:
    """Return the values of a field that ask for nothing, in brackets; "" for none."""
    in_chats, in_completions = CHAT_NEUTRAL.get(name, ()), COMPLETION_NEUTRAL.get(name, ())
    values = " or ".join(json.dumps(value) for value in in_chats or in_completions)
    if not values:
        return ""
    if in_chats == in_completions:
        return f" ({values})"
    return f" ({values}, in {'chats' if in_chats else 'completions'})"
