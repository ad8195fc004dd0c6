"""What the response encoders of the four APIs share. Start reading at `ResponseEncoder`.

    completions.py:CompletionEncoder   chat.py:ChatEncoder
    messages.py:MessageEncoder         responses/encoder.py:ResponsesEncoder

A chunk that only adds text is assembled from strings that are prepared once per response, so that
a streamed token costs the encoding of one string; everything else is rare and goes through
`json.dumps`. The output is ASCII, so that no Unicode line separator can split an event.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Final

from api_server.errors import error_body
from api_server.generation.request_stream import Delta, RequestStream, Usage
from api_server.protocol.common import GenerationRequest
from api_server.text.logprobs import ChatLogprobs, TokenNames, prompt_logprobs
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import RequestError

DONE: Final = "data: [DONE]\n\n"
KEEP_ALIVE: Final = "\n\n"
"""Empty lines: an event without fields, which parsers skip (HTML standard, server-sent events).

Not a comment, which some clients join with the next event. Two newlines, because some clients split
the stream at them: a single one would become part of the next event."""
json_string: Final = json.encoder.encode_basestring_ascii


_ROWS_PER_PART: Final = 128
_SMALL_ROWS: Final = 16
"""Tokens whose log-probabilities are made at once."""
_CHARACTERS_PER_PART: Final = 1 << 16
_NUMBERS: Final = (int, float, type(None))


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, ChatLogprobs):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON")


_dumps: Final = json.JSONEncoder(default=_as_list).encode


def json_parts(value: Any, dumps: Callable[[Any], str] = _dumps) -> Iterator[str]:
    """Yield the JSON text of a value in parts, each of which takes little work.

    Iterators and ChatLogprobs are lists whose elements are made when they are encoded. They may
    stand in a dict, in a list or in another iterator.
    """
    if not has_parts(value):
        yield dumps(value)
    elif isinstance(value, str):
        yield '"'
        for start in range(0, len(value), _CHARACTERS_PER_PART):
            yield dumps(value[start : start + _CHARACTERS_PER_PART])[1:-1]
        yield '"'
    elif isinstance(value, dict):
        separator = "{"
        for key, child in value.items():
            yield f"{separator}{dumps(key)}: "
            yield from json_parts(child, dumps)
            separator = ", "
        yield "}"
    else:
        separator = "["
        is_large = (lambda _: False) if isinstance(value, ChatLogprobs) else has_parts
        for are_large, children in groupby(value, is_large):
            if are_large:
                for child in children:
                    yield separator
                    yield from json_parts(child, dumps)
                    separator = ", "
            while batch := list(islice(children, _ROWS_PER_PART)):
                yield f"{separator}{dumps(batch)[1:-1]}"
                separator = ", "
        yield "]" if separator == ", " else "[]"


def has_parts(value: Any) -> bool:
    """Return whether `json_parts` yields more than one part."""
    if isinstance(value, _NUMBERS):
        return False
    if isinstance(value, str):
        return len(value) > _CHARACTERS_PER_PART
    if isinstance(value, dict):
        return any(map(has_parts, value.values()))
    if isinstance(value, list):
        return len(value) > _ROWS_PER_PART or any(map(has_parts, value))
    if isinstance(value, ChatLogprobs):
        return len(value) > _SMALL_ROWS
    return isinstance(value, Iterator)


def flat_texts(texts: Iterable[str | Iterator[str]]) -> Iterator[str]:
    """Yield texts, and the parts of those that are iterators."""
    for text in texts:
        if isinstance(text, str):
            yield text
        else:
            yield from text


class ResponseEncoder:
    """Encodes the output of one request in the format of its API.

    A streamed response is `encode_start`, `encode_delta` for each delta, and `encode_end`, or at
    any time `encode_error`. Each returns complete server-sent events, or "" for none; those that
    take much work as an iterator of their parts. A response that is not streamed is `encode_body`.

    keep_alive: what keeps a silent connection open; it stands between two events.
    """

    keep_alive = KEEP_ALIVE

    def encode_start(self) -> str | Iterator[str]:
        """Return the events that are sent with the HTTP status, before the first token."""
        return ""

    def encode_delta(self, delta: Delta) -> str | Iterator[str]:
        """Return the events of a delta. The first delta of a choice also opens the choice."""
        raise NotImplementedError

    def encode_end(self, usage: Usage) -> str | Iterator[str]:
        """Return the last events of a stream that has not failed."""
        raise NotImplementedError

    def encode_error(self, error: RequestError) -> str | Iterator[str]:
        """Return the last events of a stream that has failed."""
        raise NotImplementedError

    def client_error(self, error: RequestError) -> RequestError:
        """Return an error with the field names of the client's API."""
        return error

    async def encode_body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """Return the response as a whole for `json_parts`; `deltas` contain all output.

        Others get their turn while a long one is made.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a response contains.

    request: its fields ask for it. tokenizer: names the tokens of log-probabilities. num_logprobs:
    alternatives for each token, None for no log-probabilities.
    """

    id: str
    created: int
    model: str
    request: GenerationRequest
    tokenizer: ModelTokenizer
    num_logprobs: int | None

    @property
    def token_names(self) -> TokenNames:
        as_ids = self.request.return_tokens_as_token_ids
        return TokenNames(self.tokenizer, as_ids, self.request.detokenize)

    @property
    def is_text_only(self) -> bool:
        """Chunks contain no log-probabilities, token ids, accepted drafts or usage."""
        return (
            self.num_logprobs is None
            and not self.request.return_token_ids
            and not self.request.return_accepted_drafts
            and not self.request.includes_continuous_usage
        )

    def envelope(self, object_name: str) -> dict[str, Any]:
        """Return the fields at the top of every body and chunk. object_name: its `object`."""
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}

    def routed_experts(self, stream: RequestStream, delta: Delta) -> dict[str, Any]:
        """Return the field `routed_experts` of a choice's last delta, if it was requested.

        Each token has experts but the last, which was sampled and not computed.
        """
        if not self.request.return_routed_experts or delta.finish_reason is None:
            return {}
        choice = stream.choices[delta.index % stream.num_choices]
        num_tokens = len(stream.prompt_token_ids) + len(choice.token_ids) - 1
        return {"routed_experts": choice.experts.encode(num_tokens)}

    def accepted_drafts(self, stream: RequestStream, delta: Delta) -> dict[str, Any]:
        """Return the field `accepted_drafts` of a delta, a value per token, if it was requested."""
        if not self.request.return_accepted_drafts:
            return {}
        choice = stream.choices[delta.index % stream.num_choices]
        start = delta.num_tokens - len(delta.token_ids)
        return {"accepted_drafts": choice.accepted_drafts(start, delta.num_tokens)}

    def prompt_logprobs(self, stream: RequestStream) -> Iterator[Any] | None:
        """Return the field `prompt_logprobs`; None if it was not requested."""
        if self.request.prompt_logprobs is None:
            return None
        names = TokenNames(self.tokenizer, has_text=self.request.detokenize)
        return prompt_logprobs(stream.prompt_rows, self.request.prompt_logprobs, names)


class OpenAIStreamEncoder(ResponseEncoder):
    """End and error of the streams of completions and chat: they end with [DONE]."""

    def __init__(self, options: ResponseOptions, chunk_object: str) -> None:
        self._options = options
        self._chunk_object = chunk_object

    def encode_end(self, usage: Usage) -> str:
        """Return [DONE], after the usage if it was requested."""
        if not self._options.request.includes_usage:
            return DONE
        event = self._options.envelope(self._chunk_object) | {"choices": []}
        return sse_event(event | {"usage": usage_object(self._reported_usage(usage))}) + DONE

    def encode_error(self, error: RequestError) -> str:
        return sse_event(error_body(error)) + DONE

    def _reported_usage(self, usage: Usage) -> Usage:
        """Return the usage that the client sees."""
        return usage


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the `usage` of completions and chat."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


PLACEHOLDER: Final = "\ue000"
"""Stands in a prepared chunk for a value that changes."""


def text_chunk_parts(chunk: dict[str, Any], last_fields: str) -> tuple[tuple[str, str], str]:
    """Return ((text before the index, text between index and content), text after the content).

    chunk: a chunk with PLACEHOLDER as index and content. last_fields: JSON text of the fields
    after `"logprobs": null`.
    """
    before, between, after = json.dumps(chunk).split(json.dumps(PLACEHOLDER))
    after = after.replace('"logprobs": null', f'"logprobs": null, {last_fields}')
    return (f"data: {before}", between), f"{after}\n\n"


def sse_event(body: dict[str, Any]) -> str:
    """Return a server-sent event without a name."""
    return f"data: {json.dumps(body)}\n\n"


def sse_event_parts(body: dict[str, Any], name: str = "") -> Iterator[str]:
    """Yield a server-sent event in parts."""
    yield f"event: {name}\ndata: " if name else "data: "
    yield from json_parts(body)
    yield "\n\n"


def event_data(events: str) -> list[str]:
    """Return the data of server-sent events without [DONE], as the messages of a WebSocket."""
    data = [line[6:] for line in events.split("\n") if line.startswith("data: ")]
    return [text for text in data if text != "[DONE]"]


def with_usage(
    chunk: dict[str, Any], options: ResponseOptions, stream: RequestStream, delta: Delta
) -> dict[str, Any]:
    """Return the chunk, with the usage so far if every chunk has it."""
    if options.request.includes_continuous_usage:
        prompt_tokens = len(stream.prompt_token_ids)
        chunk["usage"] = usage_object(
            Usage(prompt_tokens, delta.num_tokens, stream.num_cached_tokens)
        )
    return chunk


def transfer_params(streams: Sequence[RequestStream]) -> dict[str, Any]:
    """Return `kv_transfer_params` of the last prompt for which the KV connector reported any."""
    reported = [stream.kv_transfer_params for stream in streams if stream.kv_transfer_params]
    return {"kv_transfer_params": reported[-1]} if reported else {}


def last_chunk_fields(delta: Delta, streams: Sequence[RequestStream]) -> dict[str, Any]:
    """Return the fields that only the last chunk of a choice has."""
    return {} if delta.finish_reason is None else transfer_params(streams)
