"""What a job's turn says, kept until it is over and it is known which tool it calls.

Owns that text, so far as it is kept: of each choice the end, where calls stand. A request of
no job has `NO_TURN` and keeps nothing. The work is done once, after the last token is on its
way to the client, and what goes wrong in it stays here.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from api_server.outputs.called_tool import called_tool
from api_server.outputs.parts import CallBegins, Content, PartsParser

logger = logging.getLogger("tokend.api")

KEPT_CHARACTERS: Final = 1 << 16
"""The least that is kept of each choice; twice that is the most."""

Listener = Callable[[str], None]
"""Is given the text of a choice, piece by piece."""


def unheard(text: str) -> None:
    """The listener of a choice that nobody listens to."""


class Turn(Protocol):
    """What there is to know of a request as a turn of a job."""

    def listener(self) -> Listener:
        """For one more choice."""
        ...

    def tool(self) -> str:
        """The name, for the engine, of the tool that the job waits for now; empty for none."""
        ...


class NoTurn:
    """Of a request that belongs to no job."""

    def listener(self) -> Listener:
        return unheard

    def tool(self) -> str:
        return ""


NO_TURN: Final = NoTurn()


class HeardTurn:
    """make_parser: of what a choice's text means. name: from a tool's name to the engine's."""

    def __init__(self, make_parser: Callable[[], PartsParser], name: Callable[[str], str]) -> None:
        self._make_parser = make_parser
        self._name = name
        self._choices: list[_Tail] = []

    def listener(self) -> Listener:
        self._choices.append(_Tail())
        return self._choices[-1].add

    def tool(self) -> str:
        """Of the first choice that calls one."""
        try:
            return next(filter(None, map(self._tool, self._choices)), "")
        except Exception:
            logger.exception("a turn was not understood: it counts as one that calls no tool")
            return ""

    def _tool(self, choice: "_Tail") -> str:
        return self._name(tool_of(self._make_parser(), choice.text()))


class KnownTurn:
    """tool: the engine's name of what the client says that the job waits for."""

    def __init__(self, tool: str) -> None:
        self._tool = tool

    def listener(self) -> Listener:
        return unheard

    def tool(self) -> str:
        return self._tool


def tool_of(parser: PartsParser, text: str) -> str:
    """The first call that a parser, which has read nothing, sees; else the one that is guessed.

    Only text for the reader is guessed at: what the model thinks of calling is not called.
    """
    parts = [*parser.feed(text), *parser.end()]
    named = next((each.name for each in parts if isinstance(each, CallBegins)), "")
    read = [each.text for each in parts if isinstance(each, Content)]
    return named or called_tool("".join(read))


class _Tail:
    """The end of a growing text."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._num_characters = 0

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._num_characters += len(text)
        if self._num_characters > 2 * KEPT_CHARACTERS:
            self._pieces = [self.text()]
            self._num_characters = KEPT_CHARACTERS

    def text(self) -> str:
        return "".join(self._pieces)[-KEPT_CHARACTERS:]
