"""A parser of calls, of which it is counted whether it found any."""

from collections.abc import Callable, Sequence

from api_server.outputs.parts import CallBegins, Part, PartsParser


class CountedParser:
    """`inner`; count: is told at the end whether there was a call."""

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
