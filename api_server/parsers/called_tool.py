"""Guess which tool an answer calls, when the format of its calls is unknown.

A guess from the text, for the engine's idea of how long a job stays away: wrong, it costs some
blocks of the pool for a while. Knows the forms that agents use most:

    ```bash                                         the first word of the block: pytest
    CI=1 pytest -x tests
    ```
    <tool_call>{"name": "weather", …}</tool_call>   the name; so for <function=weather> and
    {"name": "weather", "arguments": {…}}           for an answer that is nothing but the object
    [weather(city="Paris"), time()]                 the first call, of an answer that is only calls
    ```tool_code
    weather(city="Paris")
    ```

Each is looked for once, in time that grows with the text alone: no pattern can begin at more
than one place of what another attempt has read. The first form above that fits decides.
"""

import logging
import re
from collections.abc import Callable
from typing import Final

from api_server.parsers.parts import CallBegins, Content, PartsParser

SHELL: Final = "bash"
"""The tool of a block whose first word is no name."""

_NAME: Final = r"[A-Za-z0-9_.:/-]{1,64}"
_IS_NAME: Final = re.compile(_NAME)
_BLOCK: Final = re.compile(r"^[ \t]{0,3}```(bash|sh|shell|console|tool_code)[ \t]*\n", re.M)
_SETTING: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_MARK: Final = re.compile(r"<tool_call>|<function=|<\|tool_call\|>|<\|python_tag\|>|\[TOOL_CALLS\]")
_FUNCTION: Final = re.compile(rf"\s{{0,64}}(?:<function=)?({_NAME})")
_JSON_NAME: Final = re.compile(r'"name"\s{0,64}:\s{0,64}"([^"\\]{1,64})"')
_OBJECT: Final = re.compile(r'\[?\s{0,64}\{\s{0,64}"(?:name|type|function|arguments|parameters)"')
_CALLS: Final = re.compile(r"\[?\s{0,64}([A-Za-z_][A-Za-z0-9_.]{0,63})\(")
_NEAR: Final = 2048
"""Characters after a mark within which a call says its name."""
_MAX_WORDS: Final = 64
"""Words of a block that may be settings before its command."""


def called_tool(text: str) -> str:
    """The name of the tool that is called first, at most 64 letters, digits or any of _.:/-;
    empty where no call is seen."""
    return _in_block(text) or _after_mark(text) or _alone(text)


def _in_block(text: str) -> str:
    """```bash, and the like, and Gemma's ```tool_code."""
    found = _BLOCK.search(text)
    if found is None:
        return ""
    inside = text[found.end() : found.end() + _NEAR].partition("```")[0]
    if found[1] == "tool_code":
        return _python_call(inside.strip())
    return _command(inside)


def _command(script: str) -> str:
    """The program that a script starts first; comments, prompts and settings come before it."""
    for line in script.splitlines():
        for word in line.split(maxsplit=_MAX_WORDS):
            if word.startswith("#"):
                break
            if word != "$" and not _SETTING.match(word):
                name = word.rstrip("/;").rpartition("/")[2]
                return name if _IS_NAME.fullmatch(name) else SHELL
    return SHELL if script.strip() else ""


def _after_mark(text: str) -> str:
    """<tool_call> and others that begin a call, whose name is in a JSON object or stands there."""
    found = _MARK.search(text)
    if found is None:
        return ""
    after = text[found.end() : found.end() + _NEAR]
    if after.lstrip()[:1] in ("{", "["):
        return _named(after)
    function = _FUNCTION.match(after)
    return function[1] if function else ""


def _alone(text: str) -> str:
    """An answer that is nothing but a call: an object of JSON, or Python's way."""
    text = text.strip()
    if _OBJECT.match(text):
        beginning = text[:_NEAR]
        is_call = '"arguments"' in text or '"parameters"' in text
        return _named(beginning) if is_call else ""
    return _python_call(text)


def _python_call(text: str) -> str:
    found = _CALLS.match(text)
    closed = text.endswith(")]" if text.startswith("[") else ")")
    return found[1] if found and closed else ""


def _named(text: str) -> str:
    found = _JSON_NAME.search(text)
    return found[1] if found and _IS_NAME.fullmatch(found[1]) else ""


# The text of an agent's turn, kept until it ends and its tool call is known.


logger = logging.getLogger("tokend.api")

KEPT_CHARACTERS: Final = 1 << 16
"""The least that is kept of each choice; twice that is the most."""

Listener = Callable[[str], None]
"""Receives the text of a choice, piece by piece."""


class AgentTurn:
    """Find the tool that an agent calls in its turn.

    make_parser: returns the parser of one choice. name: from a tool's name to the engine's.
    declared_tool: the engine's name of the tool that the client declared; then nothing is parsed.
    """

    def __init__(
        self,
        make_parser: Callable[[], PartsParser],
        name: Callable[[str], str],
        declared_tool: str = "",
    ) -> None:
        self._make_parser = make_parser
        self._name = name
        self._declared_tool = declared_tool
        self._choices: list[_Tail] = []

    def listener(self) -> Listener | None:
        """Return what receives the text of one more choice; None if the text is not needed."""
        if self._declared_tool:
            return None
        self._choices.append(_Tail())
        return self._choices[-1].add

    def tool(self) -> str:
        """Return the engine's name of the tool of the first choice that calls one, or ""."""
        if self._declared_tool:
            return self._declared_tool
        try:
            return next(filter(None, map(self._tool, self._choices)), "")
        except Exception:
            logger.exception("a turn was not understood: it counts as one that calls no tool")
            return ""

    def _tool(self, choice: "_Tail") -> str:
        return self._name(tool_of(self._make_parser(), choice.text()))


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
