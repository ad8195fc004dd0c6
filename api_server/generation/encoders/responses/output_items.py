"""The output items of /v1/responses, which grow with the output, and their stream events.

    output_item.added ─ content_part.added ─ output_text.delta … output_text.done
                      ─ content_part.done ─ output_item.done

`encoder.py` decides which item a part of the output belongs to.
"""

import json
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from api_server.generation.encoders.base import (
    PLACEHOLDER,
    flat_texts,
    has_parts,
    json_string,
    sse_event_parts,
)
from api_server.generation.request_stream import Delta
from api_server.protocol.responses.tools import CUSTOM_INPUT, ClientTool
from api_server.text.logprobs import TextToken

Json = dict[str, Any]

# The events of a stream:
#
#     event: response.output_text.delta
#     data: {"type": "response.output_text.delta", "sequence_number": 4, …}


class EventBuffer:
    """Numbered events that have not been sent yet. They are encoded when they are popped."""

    def __init__(self) -> None:
        self._number = 0
        self._events: list[str | Json] = []

    def add_event(self, name: str, /, **fields: Any) -> None:
        """Add an event. name: without its prefix `response.`."""
        self.add_unprefixed_event(f"response.{name}", **fields)

    def add_unprefixed_event(self, kind: str, /, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def add_text_event(self, prepared: Sequence[str], text: str) -> None:
        """Add an event with this text. prepared: of `text_event`."""
        before, between, after = prepared
        self._events.append(f"{before}{self._number}{between}{json_string(text)}{after}")
        self._number += 1

    def clear(self) -> None:
        """Drop the events since the last call, for a response that is not streamed."""
        self._events.clear()

    def pop_events(self) -> str | Iterator[str]:
        """Return the events since the last call; in parts if they take much work."""
        events, self._events = self._events, []
        parts = flat_texts(
            event if isinstance(event, str) else sse_event_parts(event, event["type"])
            for event in events
        )
        are_large = any(not isinstance(event, str) and has_parts(event) for event in events)
        return parts if are_large else "".join(parts)


def text_event(name: str, /, **fields: Any) -> list[str]:
    """Return the strings before, between and after the number and the `delta` of events.

    name: without its prefix `response.`. fields: all other fields, which do not change.
    """
    event = {"type": f"response.{name}", "sequence_number": PLACEHOLDER, **fields}
    event["delta"] = PLACEHOLDER
    text = "".join(sse_event_parts(event, event["type"]))
    return text.split(json.dumps(PLACEHOLDER))


# Which tokens belong to the text of a message, if log-probabilities were requested:
#
#     tokens    <think> │ Hm │ . │ </think> │ \n\n │ Let │ _me │ <eos>
#     parts               Reasoning                    Content
#     tokens of the message                        Let   _me   <eos>


class ContentTokens:
    """Assigns the tokens of one choice to the content that a parser finds in its text.

    The text offset of the first character must be 0.
    """

    def __init__(self) -> None:
        self._unparsed: deque[TextToken] = deque()  # tokens whose text the parser has not read
        self._parsed: list[TextToken] = []  # tokens that the parser has read and not assigned
        self._unassigned: list[str] = []  # text that the parser has read since the last content
        self._num_parsed = 0  # characters

    def split_delta(self, delta: Delta) -> Iterator[str]:
        """Yield the text of a delta, split where tokens start; whole if it has no tokens."""
        self._unparsed += delta.tokens
        start, end = self._num_parsed, self._num_parsed + len(delta.text)
        while True:
            while self._unparsed and self._unparsed[0].text_offset <= self._num_parsed:
                self._parsed.append(self._unparsed.popleft())
            if self._num_parsed == end:
                return
            cut = min(self._unparsed[0].text_offset, end) if self._unparsed else end
            piece = delta.text[self._num_parsed - start : cut - start]
            self._num_parsed = cut
            if self._parsed:
                self._unassigned.append(piece)
            yield piece

    def pop_tokens(self, text: str) -> list[TextToken]:
        """Return the tokens of content that the parser has found in the text it has read.

        unassigned    </think>  \\n\\n  Let  <to    tokens before the content are dropped;
                                       └───┘      its last token may extend beyond it
        """
        unassigned = "".join(self._unassigned)
        position = max(unassigned.rfind(text), 0)
        self._unassigned = [unassigned[position + len(text) :]]
        start = self._num_parsed - len(unassigned) + position
        end = start + len(text)
        tokens = [token for token in self._parsed if token.text_offset < end]
        while len(tokens) > 1 and tokens[1].text_offset <= start:
            tokens.pop(0)
        self._parsed = [token for token in self._parsed if token.text_offset >= end]
        return tokens

    def pop_last_tokens(self) -> list[TextToken]:
        """Return the tokens after all text, such as the one that ended the choice."""
        tokens = [token for token in self._parsed if token.text_offset >= self._num_parsed]
        self._parsed, self._unassigned = [], []
        return tokens


Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem:
    """One output item. Its events are those of `open_item`, of its deltas and of `close_item`.

    id_prefix: of the item's id. events: receives its events. output_index: its index in `output`.
    """

    def __init__(self, id_prefix: str, events: EventBuffer, output_index: int) -> None:
        self._id = f"{id_prefix}_{secrets.token_hex(16)}"
        self._events = events
        self._location: Final[Json] = {"item_id": self._id, "output_index": output_index}
        self._pieces: list[str] = []

    def open_item(self) -> None:
        raise NotImplementedError

    def close_item(self, status: Status) -> None:
        raise NotImplementedError

    def full_item(self, status: Status) -> Json:
        """Return the item with all output so far."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """All text so far; of a call, its arguments."""
        return "".join(self._pieces)

    def _add_item_event(self, name: Literal["added", "done"], item: Json) -> None:
        index = self._location["output_index"]
        self._events.add_event(f"output_item.{name}", output_index=index, item=item)


class MessageItem(OutputItem):
    """The content of the answer, with log-probabilities if they were requested.

    make_logprobs: returns those of tokens, for `json_parts`.
    """

    def __init__(
        self,
        events: EventBuffer,
        output_index: int,
        make_logprobs: Callable[[Sequence[TextToken]], Any],
    ) -> None:
        super().__init__("msg", events, output_index)
        self._make_logprobs = make_logprobs
        self._tokens: list[TextToken] = []
        self._location["content_index"] = 0
        self._delta_event = text_event("output_text.delta", **self._location, logprobs=[])

    def open_item(self) -> None:
        self._add_item_event("added", self.full_item("in_progress") | {"content": []})
        self._events.add_event("content_part.added", **self._location, part=self._part())

    def append_tokens(self, tokens: Sequence[TextToken]) -> None:
        """Add tokens that have log-probabilities but no text."""
        self._tokens += tokens

    def append_content(self, text: str, tokens: Sequence[TextToken]) -> None:
        """tokens: of the text; none if their log-probabilities were not requested."""
        self._pieces.append(text)
        if not tokens:
            self._events.add_text_event(self._delta_event, text)
            return
        self._tokens += tokens
        logprobs = self._make_logprobs(tokens)
        self._events.add_event("output_text.delta", **self._location, delta=text, logprobs=logprobs)

    def close_item(self, status: Status) -> None:
        part, location = self._part(), self._location
        text, logprobs = part["text"], part["logprobs"]
        self._events.add_event("output_text.done", **location, text=text, logprobs=logprobs)
        self._events.add_event("content_part.done", **location, part=part)
        self._add_item_event("done", self.full_item(status))

    def full_item(self, status: Status) -> Json:
        return {
            "type": "message",
            "id": self._id,
            "role": "assistant",
            "status": status,
            "content": [self._part()],
        }

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self._make_logprobs(list(self._tokens)) if self._tokens else [],
        }


_REASONING_FORMS: Final = (
    ("content_index", "reasoning_text", "reasoning_text", "content_part"),
    ("summary_index", "summary_text", "reasoning_summary_text", "reasoning_summary_part"),
)
"""The reasoning and its summary: field with the index of the part in events, type of the part,
prefixes of the events of its text and of the part."""


class ReasoningItem(OutputItem):
    """The reasoning. has_summary: the same text is sent as a summary too."""

    def __init__(self, events: EventBuffer, output_index: int, *, has_summary: bool) -> None:
        super().__init__("rs", events, output_index)
        self._forms = _REASONING_FORMS if has_summary else _REASONING_FORMS[:1]
        self._delta_events = [
            text_event(f"{prefix}.delta", **self._location, **{place: 0})
            for place, _, prefix, _ in self._forms
        ]

    def open_item(self) -> None:
        empty: Json = {"summary": [], "content": []}
        self._add_item_event("added", self.full_item("in_progress") | empty)
        for place, kind, _, part_event in self._forms:
            location = self._location | {place: 0}
            part = {"type": kind, "text": ""}
            self._events.add_event(f"{part_event}.added", **location, part=part)

    def append_reasoning(self, text: str) -> None:
        self._pieces.append(text)
        for delta_event in self._delta_events:
            self._events.add_text_event(delta_event, text)

    def close_item(self, status: Status) -> None:
        text = self.text
        for place, kind, text_prefix, part_event in self._forms:
            location = self._location | {place: 0}
            part = {"type": kind, "text": text}
            self._events.add_event(f"{text_prefix}.done", **location, text=text)
            self._events.add_event(f"{part_event}.done", **location, part=part)
        self._add_item_event("done", self.full_item(status))

    def full_item(self, status: Status) -> Json:
        content, *summary = ({"type": kind, "text": self.text} for _, kind, _, _ in self._forms)
        return {
            "type": "reasoning",
            "id": self._id,
            "summary": summary,
            "content": [content],
            "encrypted_content": None,
            "status": status,
        }


class CallItem(OutputItem):
    """A call of a function or of a custom tool.

    The input of a custom tool is known only when the arguments are complete.
    """

    def __init__(
        self, events: EventBuffer, output_index: int, call_id: str, tool: ClientTool
    ) -> None:
        super().__init__("ctc" if tool.is_custom else "fc", events, output_index)
        self._is_custom = tool.is_custom
        self._call = {"call_id": call_id, "name": tool.name}
        if tool.namespace:
            self._call["namespace"] = tool.namespace
        self._delta_event = text_event("function_call_arguments.delta", **self._location)

    def open_item(self) -> None:
        self._add_item_event("added", self.full_item("in_progress"))

    def append_arguments(self, arguments: str) -> None:
        self._pieces.append(arguments)
        if not self._is_custom:
            self._events.add_text_event(self._delta_event, arguments)

    def close_item(self, status: Status) -> None:
        add_event, location = self._events.add_event, self._location
        if self._is_custom:
            tool_input = _custom_input(self.text)
            add_event("custom_tool_call_input.delta", **location, delta=tool_input)
            add_event("custom_tool_call_input.done", **location, input=tool_input)
        else:
            name, arguments = self._call["name"], self.text
            add_event("function_call_arguments.done", **location, name=name, arguments=arguments)
        self._add_item_event("done", self.full_item(status))

    def full_item(self, status: Status) -> Json:
        kind, given = "function_call", {"arguments": self.text}
        if self._is_custom:
            kind, given = "custom_tool_call", {"input": _custom_input(self.text)}
        return {"type": kind, "id": self._id, **self._call, **given, "status": status}


def _custom_input(arguments: str) -> str:
    """Return the text input of a custom tool; all arguments if they do not have the right form."""
    try:
        tool_input = json.loads(arguments)[CUSTOM_INPUT]
    except (ValueError, TypeError, KeyError):
        return arguments
    return tool_input if isinstance(tool_input, str) else json.dumps(tool_input)
