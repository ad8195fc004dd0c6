"""Reads calls that are objects of JSON, behind a mark or at the beginning of an answer.

    text ──mark──▶ opened ──{──▶ object ──}──▶ behind ──end mark, or anything else──▶ text
                     ▲  └ name ─▶ ┘              │
                     └────── , or ; ─────────────┘

A call is emitted when its object is complete and valid; until then its text is kept. What
turns out to be no call is content, from the mark on, and reading goes on behind it: no character is
read twice.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from api_server.parsers.tools.common import (
    NAME,
    Call,
    CallsReader,
    NewId,
    Scanner,
    is_object,
    json_scanner,
    read_call,
)

_NAME_SO_FAR: Final = re.compile(NAME.replace("{1,128}", "{0,129}"))
_IS_NAME: Final = re.compile(NAME)
SEPARATORS: Final = ("", ",", ";")
ARGUMENTS_MARK: Final = "[ARGS]"
ID_MARK: Final = "[CALL_ID]"
_ID: Final = re.compile(r"[A-Za-z0-9_-]{0,64}")


@dataclass(frozen=True, slots=True)
class JsonMarks:
    """opening: begins calls. closing: may end one, empty for nothing.

    separator: between objects behind one mark that are in no list, empty for none.
    bare: an answer that begins with an object of a known name is a call without a mark.
    named: behind a mark may stand a name and then the arguments alone.
    """

    opening: str
    closing: str = ""
    separator: str = ""
    bare: bool = False
    named: bool = False


class JsonCallsParser(CallsReader):
    """names: of the tools that there are."""

    def __init__(self, marks: JsonMarks, names: Collection[str], new_id: NewId) -> None:
        begin = self._begin if marks.bare else self._text
        super().__init__(names, new_id, begin=begin, text=self._text, separators=SEPARATORS)
        self._marks = marks
        self._scanner: Scanner = json_scanner()
        self._in_list = False
        self._is_bare = marks.bare

    def _begin(self) -> bool:
        self._skip_blanks()
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._state = self._opened
        else:
            self._is_bare = False
            self._give_up()
        return True

    def _text(self) -> bool:
        mark = self._marks.opening
        place = self._buffer.find(mark)
        if place < 0:
            keep = self._num_of_mark()
            end = len(self._buffer) - keep
            self._writer.content(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        self._writer.content(self._buffer[:place])
        self._buffer = self._buffer[place:]
        self._keep(len(mark))
        self._is_bare = False
        self._state = self._opened
        return True

    def _opened(self) -> bool:
        self._skip_blanks()
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._scanner = json_scanner()
            self._state = self._object
        elif self._buffer[0] == "[" and not self._in_list and not self._is_bare:
            self._in_list = True
            self._keep(1)
        elif self._marks.named and not self._in_list and _IS_NAME.match(self._buffer):
            self._state = self._named
        else:
            self._give_up()
        return True

    def _named(self) -> bool:
        """find{…}, find[ARGS]{…}, find[CALL_ID]a1b2c3d4e[ARGS]{…}"""
        place = _end(_NAME_SO_FAR, self._buffer)
        name = self._buffer[:place]
        if not _IS_NAME.fullmatch(name):
            self._give_up()
            return True
        if self._buffer.startswith(ID_MARK, place):
            place = _end(_ID, self._buffer, place + len(ID_MARK))
        rest = self._buffer[place:]
        if rest.startswith((ARGUMENTS_MARK, "{")):
            self._keep(place if rest[0] == "{" else place + len(ARGUMENTS_MARK))
            self._name = name
            self._state = self._arguments
            return True
        if ARGUMENTS_MARK.startswith(rest) or ID_MARK.startswith(rest):
            return False
        self._give_up()
        return True

    def _arguments(self) -> bool:
        self._skip_blanks()
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._scanner = json_scanner()
            self._state = self._object
        else:
            self._give_up()
        return True

    def _object(self) -> bool:
        place = self._scanner.feed(self._buffer)
        self._pieces.append(self._buffer[:place])
        self._keep(place)
        if self._scanner.complete:
            self._take_call()
        elif self._scanner.broken:
            self._give_up()
        return True

    def _behind(self) -> bool:
        """After a call."""
        self._skip_blanks()
        if not self._buffer:
            return False
        marks, first = self._marks, self._buffer[0]
        if self._in_list and first in ",]":
            self._in_list = first == ","
            self._keep(1)
            if first == ",":
                self._state = self._opened
            else:
                self._raw.clear()
        elif self._in_list:
            self._give_up()
        elif marks.separator and first == marks.separator:
            self._keep(1)
            self._state = self._opened
        elif marks.closing and self._buffer.startswith(marks.closing):
            self._raw.clear()
            self._buffer = self._buffer[len(marks.closing) :]
            self._state = self._text
        elif marks.closing and marks.closing.startswith(self._buffer):
            return False
        else:
            self._give_up()
        return True

    def _take_call(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._name:
            call = Call(self._name, text) if is_object(text) else None
        else:
            call = read_call(text)
        self._name = ""
        if call is None or (self._is_bare and call.name not in self._names):
            self._give_up()
            return
        self._raw.clear()
        self._writer.call(call)
        self._state = self._behind

    def _give_up(self) -> None:
        super()._give_up()
        self._in_list = False

    def _num_of_mark(self) -> int:
        """Characters at the end of the buffer that may be the beginning of a mark."""
        mark = self._marks.opening
        place = self._buffer.find(mark[0], max(0, len(self._buffer) - len(mark) + 1))
        while place >= 0 and not mark.startswith(self._buffer[place:]):
            place = self._buffer.find(mark[0], place + 1)
        return 0 if place < 0 else len(self._buffer) - place


def _end(pattern: re.Pattern[str], text: str, place: int = 0) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place
