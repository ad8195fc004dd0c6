"""Answers in OpenAI's shapes: whole bodies and the chunks of a stream.

Owns what they have in common, and completions; chats are in chat_answer.py. A chunk that
only adds text is put together from parts prepared per request, so that a streamed token
costs one string to encode; everything else is rare and goes through `json.dumps`. Output
is ASCII: no line separator of Unicode can split an event.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from api_server.errors import error_body
from api_server.request_stream import Delta, RequestStream, Usage
from api_server.text.logprobs import (
    TokenNames,
    prompt_logprobs,
)
from proto.errors import RequestError

DONE: Final = "data: [DONE]\n\n"
KEEP_ALIVE_COMMENT: Final = ": keep-alive\n\n"
"""Clients skip lines that begin with a colon (HTML standard, server-sent events)."""
encode_string: Final = json.encoder.encode_basestring_ascii


class Answer(Protocol):
    """One endpoint's shapes for one request.

    A stream is `begin`, a `chunk` for each delta, and `end` or, at any time, `failure`; events
    are whole server-sent events, and "" is none.
    """

    @property
    def keep_alive(self) -> str:
        """What a stream that has nothing to say is kept open with."""
        ...

    def begin(self) -> str:
        """The events that come as soon as the status is known, before there is any token."""
        ...

    def chunk(self, delta: Delta) -> str:
        """Return the events of a delta; the first ones of a choice open it."""
        ...

    def end(self, usage: Usage) -> str:
        """The last events of a stream in which nothing failed."""
        ...

    def failure(self, error: RequestError) -> str:
        """The last events of a stream that fails in the middle."""
        ...

    def body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The whole answer; `deltas` hold everything of each choice."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """What an answer shows.

    names: of tokens in `logprobs`; prompt_names: of those in `prompt_logprobs`.
    top: alternatives per token, None for no log-probabilities.
    prompt_top: the same for the field `prompt_logprobs`.
    usage: a last chunk with the usage; continuous_usage: in every chunk.
    """

    id: str
    created: int
    model: str
    names: TokenNames
    prompt_names: TokenNames
    top: int | None
    prompt_top: int | None
    token_ids: bool
    usage: bool
    continuous_usage: bool

    @property
    def plain(self) -> bool:
        """Chunks hold text alone."""
        return self.top is None and not self.token_ids and not self.continuous_usage

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def prompt_logprobs(self, stream: RequestStream) -> list[dict[str, Any] | None] | None:
        """The field of that name; None when it was not asked for."""
        if self.prompt_top is None:
            return None
        return prompt_logprobs(stream.prompt_rows, self.prompt_top, self.prompt_names)


class OpenAIStream:
    """What the streams of OpenAI's older endpoints have in common: they end with [DONE]."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, shape: Shape, chunk_kind: str) -> None:
        self._shape = shape
        self._chunk_kind = chunk_kind

    def begin(self) -> str:
        return ""

    def end(self, usage: Usage) -> str:
        """With the usage before it, where that was asked for."""
        if not self._shape.usage:
            return DONE
        event = self._shape.envelope(self._chunk_kind) | {"choices": []}
        return event_of(event | {"usage": usage_object(self._counted(usage))}) + DONE

    def failure(self, error: RequestError) -> str:
        return event_of(error_body(error)) + DONE

    def _counted(self, usage: Usage) -> Usage:
        """What the client is to see of it."""
        return usage


def usage_object(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return found


HOLE: Final = "\ue000"
"""Stands in a prepared chunk for what changes."""


def around(event: dict[str, Any], last_fields: str) -> tuple[tuple[str, str], str]:
    """((before the index, between index and text), after the text) of a text-only chunk."""
    before, between, after = json.dumps(event).split(json.dumps(HOLE))
    closed = after.replace('"logprobs": null', f'"logprobs": null, {last_fields}')
    return (f"data: {before}", between), f"{closed}\n\n"


def event_of(body: dict[str, Any]) -> str:
    """As a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def with_usage(
    event: dict[str, Any], shape: Shape, stream: RequestStream, delta: Delta
) -> dict[str, Any]:
    """The event with the usage so far, where every chunk has it."""
    if shape.continuous_usage:
        prompt_tokens = len(stream.prompt_token_ids)
        event["usage"] = usage_object(
            Usage(prompt_tokens, delta.num_tokens, stream.num_cached_tokens)
        )
    return event


def transfer_params(streams: Sequence[RequestStream]) -> dict[str, Any]:
    """Where the KV is, if the connector says so; of the last prompt of which it does."""
    told = [stream.kv_transfer_params for stream in streams if stream.kv_transfer_params]
    return {"kv_transfer_params": told[-1]} if told else {}


def at_end(delta: Delta, streams: Sequence[RequestStream]) -> dict[str, Any]:
    """What only the last chunk of a choice has."""
    return {} if delta.finish_reason is None else transfer_params(streams)
