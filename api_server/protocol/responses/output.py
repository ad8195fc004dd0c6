"""The growing items of an answer of /v1/responses, and their events.

    output_item.added ─ content_part.added ─ output_text.delta … output_text.done
                      ─ content_part.done ─ output_item.done

Owns the JSON of output items. Where they stand, and what belongs into which, is for
`response_answer` to know.
"""

import json
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, Protocol

from api_server.protocol.responses.items import CUSTOM_INPUT
from api_server.protocol.responses.tools import Tool
from api_server.request_stream import Delta
from api_server.text.logprobs import TextToken

# Events of a stream of /v1/responses on their way: their form and their numbers.
#
#     event: response.output_text.delta
#     data: {"type": "response.output_text.delta", "sequence_number": 4, …}


_encode_string: Final = json.encoder.encode_basestring_ascii
_MARK: Final = "\ue000"


class EventLog:
    """Events that wait to be sent, and the number of the next one."""

    def __init__(self) -> None:
        self._number = 0
        self._events: list[str] = []

    def tell(self, name: str, /, **fields: Any) -> None:
        """One more; name: without `response.`."""
        self.tell_as(f"response.{name}", **fields)

    def tell_as(self, kind: str, /, **fields: Any) -> None:
        """One whose name is its own."""
        self._events.append(_event({"type": kind, "sequence_number": self._number, **fields}))
        self._number += 1

    def tell_text(self, form: "TextForm", text: str) -> None:
        """One that only this text and its number tell from others of its form."""
        before, between, after = form.pieces
        self._events.append(f"{before}{self._number}{between}{_encode_string(text)}{after}")
        self._number += 1

    def take(self) -> str:
        """Those since the last call."""
        events = "".join(self._events)
        self._events.clear()
        return events


class TextForm:
    """Events that differ in their number and `delta` alone, put together from prepared parts.

    name: without `response.`. fields: all others.
    """

    __slots__ = ("pieces",)

    def __init__(self, name: str, /, **fields: Any) -> None:
        event = {"type": f"response.{name}", "sequence_number": _MARK, **fields, "delta": _MARK}
        self.pieces = _event(event).split(json.dumps(_MARK))


def _event(fields: dict[str, Any]) -> str:
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n"


# Which tokens the text of a message is made of, where their log-probabilities were asked for.
#
#     tokens    <think> │ Hm │ . │ </think> │ \n\n │ Let │ _me │ <eos>
#     parts               Reasoning                    Content
#     told                                         Let   _me   <eos>


class TokensOfText:
    """Of one choice, whose first character has the offset 0."""

    def __init__(self) -> None:
        self._waiting: deque[TextToken] = deque()  # whose text the parser has not read
        self._read: list[TextToken] = []  # whose text it has, and has not said what it is
        self._unsaid: list[str] = []  # what it has read since the last content
        self._num_read = 0

    def pieces(self, delta: Delta) -> Iterator[str]:
        """The text of a delta, cut where tokens begin; all of it where it has no tokens."""
        self._waiting += delta.tokens
        start, end = self._num_read, self._num_read + len(delta.text)
        while True:
            while self._waiting and self._waiting[0].text_offset <= self._num_read:
                self._read.append(self._waiting.popleft())
            if self._num_read == end:
                return
            cut = min(self._waiting[0].text_offset, end) if self._waiting else end
            piece = delta.text[self._num_read - start : cut - start]
            self._num_read = cut
            if self._read:
                self._unsaid.append(piece)
            yield piece

    def of_content(self, text: str) -> list[TextToken]:
        """Those of a text that the parser has found in what it has read.

        unsaid    </think>  \\n\\n  Let  <to        tokens before the text belong to no text;
                                   └───┘          the last may hold what comes next as well
        """
        unsaid = "".join(self._unsaid)
        place = max(unsaid.rfind(text), 0)
        self._unsaid = [unsaid[place + len(text) :]]
        begins = self._num_read - len(unsaid) + place
        ends = begins + len(text)
        found = [each for each in self._read if each.text_offset < ends]
        while len(found) > 1 and found[1].text_offset <= begins:
            found.pop(0)
        self._read = [each for each in self._read if each.text_offset >= ends]
        return found

    def rest(self) -> list[TextToken]:
        """Those behind the last content, as the one that ended the choice."""
        found, self._read, self._unsaid = self._read, [], []
        return found


Status = Literal["in_progress", "completed", "incomplete"]
Json = dict[str, Any]


class OutputItem(Protocol):
    """One item. It has no events before `open` or after `close`."""

    def open(self) -> None: ...

    def close(self, status: Status) -> None: ...

    def json(self, status: Status) -> Json:
        """The item with all that it has so far."""
        ...


class _Base:
    """prefix: of the id. log: for events; place: output_index."""

    def __init__(self, prefix: str, log: EventLog, place: int) -> None:
        self._id = f"{prefix}_{secrets.token_hex(16)}"
        self._log = log
        self._here: Final[Json] = {"item_id": self._id, "output_index": place}
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def _added(self, item: Json) -> None:
        place = self._here["output_index"]
        self._log.tell("output_item.added", output_index=place, item=item)

    def _done(self, item: Json) -> None:
        place = self._here["output_index"]
        self._log.tell("output_item.done", output_index=place, item=item)


class MessageItem(_Base):
    """Text for the reader, with its log-probabilities where they were asked for."""

    def __init__(self, log: EventLog, place: int) -> None:
        super().__init__("msg", log, place)
        self._logprobs: list[Json] = []
        self._form = TextForm("output_text.delta", **self._here, content_index=0, logprobs=[])

    def open(self) -> None:
        self._added(self._json([], "in_progress"))
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._log.tell("content_part.added", **self._here, content_index=0, part=part)

    def add_logprobs(self, logprobs: list[Json]) -> None:
        """Of tokens that have no text."""
        self._logprobs += logprobs

    def add(self, text: str, logprobs: list[Json]) -> None:
        self._pieces.append(text)
        if not logprobs:
            self._log.tell_text(self._form, text)
            return
        self._logprobs += logprobs
        here = self._here
        self._log.tell("output_text.delta", **here, content_index=0, delta=text, logprobs=logprobs)

    def close(self, status: Status) -> None:
        here, part = self._here, self._part()
        self._log.tell(
            "output_text.done",
            **here,
            content_index=0,
            text=part["text"],
            logprobs=part["logprobs"],
        )
        self._log.tell("content_part.done", **here, content_index=0, part=part)
        self._done(self._json([part], status))

    def json(self, status: Status) -> Json:
        return self._json([self._part()], status)

    def _json(self, content: list[Json], status: Status) -> Json:
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
            "text": self._text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }


class ReasoningItem(_Base):
    """The reasoning. summarised: also sent as a summary, unchanged."""

    def __init__(self, log: EventLog, place: int, *, summarised: bool) -> None:
        super().__init__("rs", log, place)
        self._summarised = summarised

    def open(self) -> None:
        self._added(self._json([], [], "in_progress"))
        part = {"type": "reasoning_text", "text": ""}
        self._log.tell("content_part.added", **self._here, content_index=0, part=part)
        if self._summarised:
            part = {"type": "summary_text", "text": ""}
            self._log.tell("reasoning_summary_part.added", **self._here, summary_index=0, part=part)

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._log.tell("reasoning_text.delta", **self._here, content_index=0, delta=text)
        if self._summarised:
            self._log.tell(
                "reasoning_summary_text.delta", **self._here, summary_index=0, delta=text
            )

    def close(self, status: Status) -> None:
        here, text = self._here, self._text
        (part,) = self._content()
        self._log.tell("reasoning_text.done", **here, content_index=0, text=text)
        self._log.tell("content_part.done", **here, content_index=0, part=part)
        for part in self._summary():
            self._log.tell("reasoning_summary_text.done", **here, summary_index=0, text=text)
            self._log.tell("reasoning_summary_part.done", **here, summary_index=0, part=part)
        self._done(self.json(status))

    def json(self, status: Status) -> Json:
        return self._json(self._summary(), self._content(), status)

    def _json(self, summary: list[Json], content: list[Json], status: Status) -> Json:
        return {
            "type": "reasoning",
            "id": self._id,
            "summary": summary,
            "content": content,
            "encrypted_content": None,
            "status": status,
        }

    def _content(self) -> list[Json]:
        return [{"type": "reasoning_text", "text": self._text}]

    def _summary(self) -> list[Json]:
        return [{"type": "summary_text", "text": self._text}] if self._summarised else []


class FunctionItem(_Base):
    """A call of a function."""

    def __init__(self, log: EventLog, place: int, call_id: str, tool: Tool) -> None:
        super().__init__("fc", log, place)
        self._call = {"call_id": call_id, **_named(tool)}
        self._form = TextForm("function_call_arguments.delta", **self._here)

    def open(self) -> None:
        self._added(self.json("in_progress"))

    def add(self, arguments: str) -> None:
        self._pieces.append(arguments)
        self._log.tell_text(self._form, arguments)

    def close(self, status: Status) -> None:
        name, arguments = self._call["name"], self._text
        self._log.tell("function_call_arguments.done", **self._here, name=name, arguments=arguments)
        self._done(self.json(status))

    def json(self, status: Status) -> Json:
        return {
            "type": "function_call",
            "id": self._id,
            **self._call,
            "arguments": self._text,
            "status": status,
        }


class CustomItem(_Base):
    """A call of a custom tool: its input is known when the arguments are complete."""

    def __init__(self, log: EventLog, place: int, call_id: str, tool: Tool) -> None:
        super().__init__("ctc", log, place)
        self._call = {"call_id": call_id, **_named(tool)}

    def open(self) -> None:
        self._added(self._json("", "in_progress"))

    def add(self, arguments: str) -> None:
        self._pieces.append(arguments)

    def close(self, status: Status) -> None:
        given = _custom_input(self._text)
        self._log.tell("custom_tool_call_input.delta", **self._here, delta=given)
        self._log.tell("custom_tool_call_input.done", **self._here, input=given)
        self._done(self.json(status))

    def json(self, status: Status) -> Json:
        return self._json(_custom_input(self._text), status)

    def _json(self, given: str, status: Status) -> Json:
        return {
            "type": "custom_tool_call",
            "id": self._id,
            **self._call,
            "input": given,
            "status": status,
        }


CallItem = FunctionItem | CustomItem


def call_item(log: EventLog, place: int, call_id: str, tool: Tool) -> CallItem:
    """The item for a call of that tool."""
    make: Callable[..., CallItem] = CustomItem if tool.custom else FunctionItem
    return make(log, place, call_id, tool)


def _named(tool: Tool) -> Json:
    return {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})


def _custom_input(arguments: str) -> str:
    """What the client gets of the arguments; as they are where they are not what was asked for."""
    try:
        given = json.loads(arguments)[CUSTOM_INPUT]
    except (ValueError, TypeError, KeyError):
        return arguments
    return given if isinstance(given, str) else json.dumps(given)
