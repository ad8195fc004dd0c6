"""Reads calls that are a list of Python's.

    [weather(city="Paris", days=[1, 2]), now()]

Only an answer that begins so, and with a tool that there is, calls anything: lists are common in
text. Values are literals, spelt as in Python or as in JSON; the emitted arguments are JSON. A
call is emitted when it is complete; what turns out to be none is content.
"""

import json
import re
from collections.abc import Collection
from typing import Final

from api_server.parsers.tools.common import Call, CallsReader, NewId, Scanner, python_scanner

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_TOKEN: Final = re.compile(
    r"""[ \t\r\n]*(?:
        (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![0-9A-Za-z_.]))
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<mark>[\[\]{}(),:=])
    )""",
    re.X,
)
_WORDS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.S)
_ESCAPED: Final = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"},
    **{"0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""},
}
MAX_CODE: Final = 0x10FFFF
SEPARATORS: Final = ("", ",")
OPENING: Final = "<|python_start|>"
CLOSING: Final = "<|python_end|>"
"""Some models put the list between these."""


class PythonicParser(CallsReader):
    """names: of the tools that there are."""

    def __init__(self, names: Collection[str], new_id: NewId) -> None:
        begin, text = self._begin, self._text
        super().__init__(names, new_id, begin=begin, text=text, separators=SEPARATORS)
        self._scanner: Scanner = python_scanner()

    def _begin(self) -> bool:
        self._skip_blanks()
        if self._buffer.startswith("["):
            self._keep(1)
            self._state = self._element
        elif self._buffer.startswith(OPENING):
            self._keep(len(OPENING))
        elif OPENING.startswith(self._buffer):
            return False
        else:
            self._give_up()
        return True

    def _element(self) -> bool:
        self._skip_blanks()
        found = _NAME.match(self._buffer)
        if found is None:
            if self._buffer.startswith("]") and self._writer.is_behind_call:
                self._close()  # behind a comma
            elif self._buffer:
                self._give_up()
            return bool(self._buffer)
        if found.end() == len(self._buffer):
            return False
        if self._buffer[found.end()] != "(" or found[0] not in self._names:
            self._give_up()
            return True
        self._name = found[0]
        self._keep(found.end())
        self._scanner = python_scanner()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        place = self._scanner.feed(self._buffer)
        self._pieces.append(self._buffer[:place])
        self._keep(place)
        if self._scanner.broken:
            self._give_up()
        elif self._scanner.complete:
            try:
                arguments = read_arguments("".join(self._pieces))
            except (ValueError, RecursionError):
                self._give_up()
                return True
            self._pieces.clear()
            self._raw.clear()
            self._writer.call(Call(self._name, arguments))
            self._state = self._behind
        return True

    def _behind(self) -> bool:
        """After a call."""
        self._skip_blanks()
        if not self._buffer:
            return False
        if self._buffer.startswith(","):
            self._keep(1)
            self._state = self._element
        elif self._buffer.startswith("]"):
            self._close()
        else:
            self._give_up()
        return True

    def _close(self) -> None:
        self._raw.clear()
        self._buffer = self._buffer[1:]
        self._state = self._closing

    def _closing(self) -> bool:
        """After the list."""
        self._skip_blanks()
        if self._buffer.startswith(CLOSING):
            self._buffer = self._buffer[len(CLOSING) :]
            self._raw.clear()
            self._state = self._text
        elif CLOSING.startswith(self._buffer):
            return False
        else:
            self._give_up()
        return True

    def _text(self) -> bool:
        self._writer.content(self._buffer)
        self._buffer = ""
        return False


def read_arguments(text: str) -> str:
    """`(city="Paris", days=[1, 2])` as JSON; raises ValueError for what is no list of them."""
    return _Reader(text).arguments()


class _Reader:
    """Reads literals, token by token; the scanner that found their end limits the nesting."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._place = 0

    def arguments(self) -> str:
        found: dict[str, str] = {}
        self._expect("(")
        while not self._accept(")"):
            kind, name = self._next()
            if kind != "word" or name in found or name in _WORDS:
                raise ValueError("no name of an argument, or one that is there twice")
            self._expect("=")
            found[name] = self._value()
            if not self._accept(","):
                self._expect(")")
                break
        if self._place < len(self._tokens):
            raise ValueError("there is more")
        pairs = [f"{json.dumps(name)}: {value}" for name, value in found.items()]
        return "{" + ", ".join(pairs) + "}"

    def _value(self) -> str:
        kind, text = self._next()
        if kind == "string":
            return json.dumps(_string(text), ensure_ascii=False)
        if kind == "number":
            return text
        if kind == "word" and text in _WORDS:
            return _WORDS[text]
        if text == "[":
            return "[" + ", ".join(self._values()) + "]"
        if text == "{":
            return "{" + ", ".join(self._pairs()) + "}"
        raise ValueError("no literal")

    def _values(self) -> list[str]:
        values = []
        while not self._accept("]"):
            values.append(self._value())
            if not self._accept(","):
                self._expect("]")
                break
        return values

    def _pairs(self) -> list[str]:
        pairs = []
        while not self._accept("}"):
            kind, key = self._next()
            if kind != "string":
                raise ValueError("keys are strings")
            self._expect(":")
            pairs.append(f"{json.dumps(_string(key), ensure_ascii=False)}: {self._value()}")
            if not self._accept(","):
                self._expect("}")
                break
        return pairs

    def _next(self) -> tuple[str, str]:
        if self._place == len(self._tokens):
            raise ValueError("there is no more")
        self._place += 1
        return self._tokens[self._place - 1]

    def _accept(self, mark: str) -> bool:
        is_there = self._place < len(self._tokens) and self._tokens[self._place] == ("mark", mark)
        self._place += is_there
        return is_there

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise ValueError(f"no {mark}")


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, place = [], 0
    end = len(text.rstrip(" \t\r\n"))
    while place < end:
        found = _TOKEN.match(text, place)
        if found is None or found.lastgroup is None:
            raise ValueError("no token")
        tokens.append((found.lastgroup, found[found.lastgroup]))
        place = found.end()
    return tokens


def _string(token: str) -> str:
    """As JSON where it is; raises ValueError for what is no text."""
    if token[0] == '"':
        try:
            value = str(json.loads(token))
        except ValueError:
            value = _ESCAPE.sub(_unescaped, token[1:-1])
    else:
        value = _ESCAPE.sub(_unescaped, token[1:-1])
    value.encode()
    return value


def _unescaped(found: re.Match[str]) -> str:
    """Of Python's escapes; one that is none stands for itself, as there."""
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= MAX_CODE else found[0]
    return _ESCAPED.get(code, found[0])
