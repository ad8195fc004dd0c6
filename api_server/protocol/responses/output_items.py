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

from api_server.protocol.encoder import (
    PLACEHOLDER,
    flat_texts,
    has_parts,
    json_string,
    sse_event_parts,
)
from api_server.protocol.responses.tools import CUSTOM_INPUT, ClientTool
from api_server.request_stream import Delta
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

    def add_text_event(self, template: "TextEventTemplate", text: str) -> None:
        """Add an event of a template with this text."""
        before, between, after = template.pieces
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


class TextEventTemplate:
    """Prepared strings of events that differ only in their number and their `delta`.

    name: without its prefix `response.`. fields: all other fields.
    """

    __slots__ = ("pieces",)

    def __init__(self, name: str, /, **fields: Any) -> None:
        event = {"type": f"response.{name}", "sequence_number": PLACEHOLDER, **fields}
        event["delta"] = PLACEHOLDER
        text = "".join(sse_event_parts(event, event["type"]))
        self.pieces = text.split(json.dumps(PLACEHOLDER))


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
        self._output_index = output_index
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

    def _add_opening_event(self, item: Json) -> None:
        index = self._output_index
        self._events.add_event("output_item.added", output_index=index, item=item)

    def _add_closing_event(self, item: Json) -> None:
        index = self._output_index
        self._events.add_event("output_item.done", output_index=index, item=item)


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
        self._delta_template = TextEventTemplate(
            "output_text.delta", **self._location, content_index=0, logprobs=[]
        )

    def open_item(self) -> None:
        self._add_opening_event(self._item([], "in_progress"))
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._events.add_event("content_part.added", **self._location, content_index=0, part=part)

    def append_tokens(self, tokens: Sequence[TextToken]) -> None:
        """Add tokens that have log-probabilities but no text."""
        self._tokens += tokens

    def append_content(self, text: str, tokens: Sequence[TextToken]) -> None:
        """tokens: of the text; none if their log-probabilities were not requested."""
        self._pieces.append(text)
        if not tokens:
            self._events.add_text_event(self._delta_template, text)
            return
        self._tokens += tokens
        self._events.add_event(
            "output_text.delta",
            **self._location,
            content_index=0,
            delta=text,
            logprobs=self._make_logprobs(tokens),
        )

    def close_item(self, status: Status) -> None:
        part = self._part()
        self._events.add_event(
            "output_text.done",
            **self._location,
            content_index=0,
            text=part["text"],
            logprobs=part["logprobs"],
        )
        self._events.add_event("content_part.done", **self._location, content_index=0, part=part)
        self._add_closing_event(self._item([part], status))

    def full_item(self, status: Status) -> Json:
        return self._item([self._part()], status)

    def _item(self, content: list[Json], status: Status) -> Json:
        return {
            "type": "message",
            "id": self._id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self._make_logprobs(list(self._tokens)) if self._tokens else [],
        }


class ReasoningItem(OutputItem):
    """The reasoning. has_summary: the same text is sent as a summary too."""

    def __init__(self, events: EventBuffer, output_index: int, *, has_summary: bool) -> None:
        super().__init__("rs", events, output_index)
        self._has_summary = has_summary

    def open_item(self) -> None:
        location, part = self._location, {"type": "reasoning_text", "text": ""}
        self._add_opening_event(self._item([], [], "in_progress"))
        self._events.add_event("content_part.added", **location, content_index=0, part=part)
        if self._has_summary:
            part = {"type": "summary_text", "text": ""}
            self._events.add_event(
                "reasoning_summary_part.added", **location, summary_index=0, part=part
            )

    def append_reasoning(self, text: str) -> None:
        location = self._location
        self._pieces.append(text)
        self._events.add_event("reasoning_text.delta", **location, content_index=0, delta=text)
        if self._has_summary:
            self._events.add_event(
                "reasoning_summary_text.delta", **location, summary_index=0, delta=text
            )

    def close_item(self, status: Status) -> None:
        location, text, events = self._location, self.text, self._events
        (part,) = self._content()
        events.add_event("reasoning_text.done", **location, content_index=0, text=text)
        events.add_event("content_part.done", **location, content_index=0, part=part)
        for part in self._summary():
            events.add_event("reasoning_summary_text.done", **location, summary_index=0, text=text)
            events.add_event("reasoning_summary_part.done", **location, summary_index=0, part=part)
        self._add_closing_event(self.full_item(status))

    def full_item(self, status: Status) -> Json:
        return self._item(self._summary(), self._content(), status)

    def _item(self, summary: list[Json], content: list[Json], status: Status) -> Json:
        return {
            "type": "reasoning",
            "id": self._id,
            "summary": summary,
            "content": content,
            "encrypted_content": None,
            "status": status,
        }

    def _content(self) -> list[Json]:
        return [{"type": "reasoning_text", "text": self.text}]

    def _summary(self) -> list[Json]:
        return [{"type": "summary_text", "text": self.text}] if self._has_summary else []


class FunctionCallItem(OutputItem):
    """A call of a function."""

    def __init__(
        self, events: EventBuffer, output_index: int, call_id: str, tool: ClientTool
    ) -> None:
        super().__init__("fc", events, output_index)
        self._call = {"call_id": call_id, **_tool_fields(tool)}
        self._delta_template = TextEventTemplate("function_call_arguments.delta", **self._location)

    def open_item(self) -> None:
        self._add_opening_event(self.full_item("in_progress"))

    def append_arguments(self, arguments: str) -> None:
        self._pieces.append(arguments)
        self._events.add_text_event(self._delta_template, arguments)

    def close_item(self, status: Status) -> None:
        name, arguments = self._call["name"], self.text
        self._events.add_event(
            "function_call_arguments.done", **self._location, name=name, arguments=arguments
        )
        self._add_closing_event(self.full_item(status))

    def full_item(self, status: Status) -> Json:
        return {
            "type": "function_call",
            "id": self._id,
            **self._call,
            "arguments": self.text,
            "status": status,
        }


class CustomToolCallItem(OutputItem):
    """A call of a custom tool. Its input is known only when the arguments are complete."""

    def __init__(
        self, events: EventBuffer, output_index: int, call_id: str, tool: ClientTool
    ) -> None:
        super().__init__("ctc", events, output_index)
        self._call = {"call_id": call_id, **_tool_fields(tool)}

    def open_item(self) -> None:
        self._add_opening_event(self._item("", "in_progress"))

    def append_arguments(self, arguments: str) -> None:
        self._pieces.append(arguments)

    def close_item(self, status: Status) -> None:
        tool_input = _custom_input(self.text)
        self._events.add_event("custom_tool_call_input.delta", **self._location, delta=tool_input)
        self._events.add_event("custom_tool_call_input.done", **self._location, input=tool_input)
        self._add_closing_event(self.full_item(status))

    def full_item(self, status: Status) -> Json:
        return self._item(_custom_input(self.text), status)

    def _item(self, tool_input: str, status: Status) -> Json:
        return {
            "type": "custom_tool_call",
            "id": self._id,
            **self._call,
            "input": tool_input,
            "status": status,
        }


CallItem = FunctionCallItem | CustomToolCallItem


def call_item(events: EventBuffer, output_index: int, call_id: str, tool: ClientTool) -> CallItem:
    """Return the item for a call of this tool."""
    item_class = CustomToolCallItem if tool.is_custom else FunctionCallItem
    return item_class(events, output_index, call_id, tool)


def _tool_fields(tool: ClientTool) -> Json:
    return {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})


def _custom_input(arguments: str) -> str:
    """Return the text input of a custom tool; all arguments if they do not have the right form."""
    try:
        tool_input = json.loads(arguments)[CUSTOM_INPUT]
    except (ValueError, TypeError, KeyError):
        return arguments
    return tool_input if isinstance(tool_input, str) else json.dumps(tool_input)
