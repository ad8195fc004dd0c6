"""Compaction: a shorter window of items that replaces a conversation of /v1/responses.

    conversation   system  user  call  result  assistant  user  assistant  call
                     │      │      └──────────┬────────────┼────────┘        │
    window         system  user               │           user  compaction  call
                                              └──────────────── summary

The model writes the summary. A compaction item holds it as `encrypted_content`, a field that
clients send back unread; it is not encrypted here. A call that has no result yet stays.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from api_server.protocol.common import Text
from api_server.protocol.fields import IgnoredFields, Strict, parse
from api_server.protocol.responses.input import (
    Item,
    is_unreadable_summary,
    split_pending_calls,
    with_id,
)
from api_server.protocol.responses.request import (
    InputItems,
    Label,
    ReasoningOptions,
    ResponsesRequest,
)
from proto.errors import InvalidRequestError

MAX_SUMMARY_TOKENS: Final = 2048
SUMMARY_CONTEXT_SHARE: Final = 4
"""A summary has at most 1/4 of the context, and so, roughly, have the messages that stay."""
_SUMMARY_REQUEST: Final = (
    "Summarise this conversation for an assistant that will continue it and sees nothing else of "
    "it. State what the user wants, what was decided and done, every fact that is needed later "
    "(names, paths, numbers, exact messages of errors), and what is left to do. Write only the "
    "summary."
)
_REQUEST_FIELDS: Final = (
    *("agent_hint", "session_id", "request_id", "cache_salt", "priority", "seed"),
    *("skip_reading_prefix_cache", "timeout_ms", "queue_timeout_ms", "data_parallel_rank"),
)
"""Fields that mean the same as in a response."""


class CompactionRequest(Strict):
    model: Text
    """Name of the served model."""
    input: InputItems = []
    """The items of the conversation, as in a response."""
    previous_response_id: Annotated[Text, Field(max_length=256)] | None = None
    """A stored response whose conversation comes before the input."""
    instructions: Text | None = None
    """Instructions before the conversation; the window does not contain them."""
    prompt_cache_key: Label | None = None
    """Has no effect."""


def parse_compaction(
    fields: Any, max_model_len: int, ignored: IgnoredFields
) -> tuple[ResponsesRequest, dict[str, Any]]:
    """Return the response whose text is the summary, and its fields for the chat.

    ignored: collects the fields of a response that a compaction lacks. Raises InvalidRequestError.
    """
    passed: dict[str, Any] = {}
    if isinstance(fields, dict):
        passed = {name: fields[name] for name in _REQUEST_FIELDS if name in fields}
        unused = ResponsesRequest.model_fields.keys() - CompactionRequest.model_fields.keys()
        for name in unused & fields.keys():
            ignored.add(name)
        fields = {
            name: value
            for name, value in fields.items()
            if name not in passed and name not in unused
        }
    request = parse(CompactionRequest, fields, {}, ignored)
    response = ResponsesRequest(
        model=request.model,
        input=request.input,
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        reasoning=ReasoningOptions(effort="none"),
        max_output_tokens=min(MAX_SUMMARY_TOKENS, max(1, max_model_len // SUMMARY_CONTEXT_SHARE)),
        temperature=0.0,
        truncation="auto",
        store=False,
    )
    return response, passed


def summary_conversation(items: Sequence[Item]) -> list[Item]:
    """Return the items whose answer is the summary.

    Raises InvalidRequestError for none, and for another server's summary, which would be lost.
    """
    summarised, _ = split_pending_calls(items)
    if any(map(is_unreadable_summary, summarised)):
        raise InvalidRequestError(
            "input: a compaction of another server cannot be read, and would be lost", "input"
        )
    if not summarised:
        raise InvalidRequestError("input must not be empty", "input")
    question = {"type": "message", "role": "user", "content": _SUMMARY_REQUEST}
    return [*summarised, with_id(question)]
