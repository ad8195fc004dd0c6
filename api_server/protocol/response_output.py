"""The items of an answer of /v1/responses as they grow, and the events that tell of each.

    output_item.added ─ content_part.added ─ output_text.delta … output_text.done
                      ─ content_part.done ─ output_item.done

Owns the JSON of output items. Where they stand, and what belongs into which, is for
`response_answer` to know.
"""

import json
import secrets
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

from api_server.protocol.response_events import EventLog, TextForm
from api_server.protocol.response_items import CUSTOM_INPUT
from api_server.protocol.response_tools import Tool

Status = Literal["in_progress", "completed", "incomplete"]
Json = dict[str, Any]


class OutputItem(Protocol):
    """One item. Nothing is told of it before `open` or after `close`."""

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
    """What the model thinks. summarised: told as a summary as well, word for word."""

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
