"""JSON Schemas of what the daemon answers, for the OpenAPI document.

Requests have theirs from their models. Only what every answer has is required; fields that are
there when they were asked for are named.
"""

from typing import Any, Final

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
