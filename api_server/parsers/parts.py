"""The parts of a chat answer: what its text means.

    <think>Which city?</think>               Reasoning("Which city?")
    Let me look.                             Content("Let me look.")
    <tool_call>{"name": "weather",           CallBegins(0, "call_…", "weather")
    "arguments": {"city": "Paris"}}          CallArguments(0, '{"city": "Paris"}')

Every API of chat has these in words of its own; a parser knows the words of a model. Owns
neither: only what passes between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader. More of them in a row are one text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text in which the model thinks. More of them in a row are one text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool is called. index: 0 for the first call of an answer. call_id: unique to the call."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; those of one index, joined, are a JSON object at its end."""

    index: int
    text: str


Part = Content | Reasoning | CallBegins | CallArguments


class PartsParser(Protocol):
    """Reads the text of one choice, in pieces that may end anywhere.

    Nothing is lost: text that turns out to be no call is Content.
    """

    def feed(self, text: str) -> Sequence[Part]:
        """What is known after so much more text."""
        ...

    def end(self) -> Sequence[Part]:
        """There is no more text: what was held back until its meaning was known."""
        ...


class PlainText:
    """All of it is for the reader."""

    def feed(self, text: str) -> Sequence[Part]:
        return (Content(text),) if text else ()

    def end(self) -> Sequence[Part]:
        return ()


PLAIN_TEXT: Final = PlainText()
"""Has no state: one is enough for all."""


# A parser of calls, of which it is counted whether it found any.


class CountedParser:
    """`inner`; count: is called at the end with whether there was a call."""

    def __init__(self, inner: PartsParser, count: Callable[[bool], None]) -> None:
        self._inner = inner
        self._count = count
        self._has_calls = False

    def feed(self, text: str) -> Sequence[Part]:
        return self._seen(self._inner.feed(text))

    def end(self) -> Sequence[Part]:
        parts = self._seen(self._inner.end())
        self._count(self._has_calls)
        return parts

    def _seen(self, parts: Sequence[Part]) -> Sequence[Part]:
        self._has_calls = self._has_calls or any(isinstance(each, CallBegins) for each in parts)
        return parts
