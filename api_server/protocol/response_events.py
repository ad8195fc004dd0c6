"""Events of a stream of /v1/responses on their way: their form and their numbers.

    event: response.output_text.delta
    data: {"type": "response.output_text.delta", "sequence_number": 4, …}

Owns both. Output is ASCII: no line separator of Unicode can split an event.
"""

import json
from typing import Any, Final

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
