"""Which tool an agent's answer calls. Start reading at `AgentTurn`.

The engine estimates from the tool how long the agent stays away, and retains its KV for that long;
a wrong tool only wastes KV blocks for a while. The parser of the model's format decides if it finds
a call. Otherwise `guess_called_tool` looks for the forms that agents use most:

    ```bash                                         the first word of the block: pytest
    CI=1 pytest -x tests
    ```
    <tool_call>{"name": "weather", …}</tool_call>   the name; the same for <function=weather> and
    {"name": "weather", "arguments": {…}}           for an answer that is nothing but the object
    [weather(city="Paris"), time()]                 the first call of an answer of calls only
    ```tool_code
    weather(city="Paris")
    ```

The first form in this order that matches decides. No pattern can start inside text that another
attempt has read, so the time is linear in the length of the text.
"""

import logging
import re
from collections.abc import Sequence
from typing import Final

from api_server.parsers.output import ContentText, OutputParser, ToolCallStart
from api_server.protocol.agents import tool_name

logger = logging.getLogger("tokend.api")

KEPT_CHARACTERS: Final = 1 << 16
"""Minimum number of characters at the end of a choice that are kept; the maximum is twice that."""


class AgentTurn:
    """Finds the tool that an agent calls in one turn.

    parsers: one for each choice. tenant: prefixes the names of tools, so that tenants do not share
    them. declared_tool: the tool that the client declared in `agent_hint`; the text of the choices
    is not needed then, and `tails` is empty.

    tails: collect the text of each choice.
    """

    def __init__(
        self, parsers: Sequence[OutputParser], tenant: int, declared_tool: str | None = None
    ) -> None:
        self._parsers = parsers
        self._tenant = tenant
        self._declared_tool = declared_tool
        self.tails = [] if declared_tool is not None else [TextTail() for _ in parsers]

    def called_tool(self) -> str:
        """Return the engine's name of the tool that the first calling choice calls, or ""."""
        if self._declared_tool is not None:
            return tool_name(self._declared_tool, self._tenant)
        try:
            for parser, tail in zip(self._parsers, self.tails, strict=True):
                tool = find_called_tool(parser, tail.text)
                if tool:
                    return tool_name(tool, self._tenant)
        except Exception:
            logger.exception("the tool call of an agent could not be parsed; it counts as none")
        return ""


def find_called_tool(parser: OutputParser, text: str) -> str:
    """Return the first tool that a text calls, by a fresh parser or else by a guess; "" for none.

    Only content is used for the guess: a call that the model merely reasons about is none.
    """
    parts = [*parser.parse_delta(text), *parser.parse_end()]
    for part in parts:
        if isinstance(part, ToolCallStart):
            return part.name
    content = [part.text for part in parts if isinstance(part, ContentText)]
    return guess_called_tool("".join(content))


class TextTail:
    """The last KEPT_CHARACTERS characters of a growing text."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._num_characters = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)[-KEPT_CHARACTERS:]

    def append_text(self, text: str) -> None:
        self._pieces.append(text)
        self._num_characters += len(text)
        if self._num_characters > 2 * KEPT_CHARACTERS:
            self._pieces = [self.text]
            self._num_characters = KEPT_CHARACTERS


UNNAMED_COMMAND: Final = "bash"
"""The tool of a shell block whose first word is not a valid name."""

_NAME: Final = r"[A-Za-z0-9_.:/-]{1,64}"
_IS_NAME: Final = re.compile(_NAME)
_CODE_BLOCK: Final = re.compile(r"^[ \t]{0,3}```(bash|sh|shell|console|tool_code)[ \t]*\n", re.M)
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_MARKER: Final = re.compile(
    r"<tool_call>|<function=|<\|tool_call\|>|<\|python_tag\|>|\[TOOL_CALLS\]"
)
_FUNCTION: Final = re.compile(rf"\s{{0,64}}(?:<function=)?({_NAME})")
_JSON_NAME: Final = re.compile(r'"name"\s{0,64}:\s{0,64}"([^"\\]{1,64})"')
_OBJECT: Final = re.compile(r'\[?\s{0,64}\{\s{0,64}"(?:name|type|function|arguments|parameters)"')
_PYTHON_CALL: Final = re.compile(r"\[?\s{0,64}([A-Za-z_][A-Za-z0-9_.]{0,63})\(")
_MAX_DISTANCE: Final = 2048
"""Characters after a marker within which a call must contain its name."""
_MAX_WORDS: Final = 64
"""Words of a line that may be assignments before its command."""


def guess_called_tool(text: str) -> str:
    """Return the name of the first tool that a text calls, or "".

    A name has at most 64 characters: letters, digits and any of _.:/-
    """
    return _tool_in_code_block(text) or _tool_after_marker(text) or _tool_of_whole_text(text)


def _tool_in_code_block(text: str) -> str:
    """Return the command of a shell block, or the function of Gemma's ```tool_code."""
    found = _CODE_BLOCK.search(text)
    if found is None:
        return ""
    code = text[found.end() : found.end() + _MAX_DISTANCE].partition("```")[0]
    if found[1] == "tool_code":
        return _python_function(code.strip())
    return _first_command(code)


def _first_command(script: str) -> str:
    """Return the first program that a shell script runs, after comments, `$` and assignments."""
    for line in script.splitlines():
        for word in line.split(maxsplit=_MAX_WORDS):
            if word.startswith("#"):
                break
            if word != "$" and not _ASSIGNMENT.match(word):
                name = word.rstrip("/;").rpartition("/")[2]
                return name if _IS_NAME.fullmatch(name) else UNNAMED_COMMAND
    return UNNAMED_COMMAND if script.strip() else ""


def _tool_after_marker(text: str) -> str:
    """Return the tool of a call after <tool_call> or another marker, in JSON or by its name."""
    found = _MARKER.search(text)
    if found is None:
        return ""
    after = text[found.end() : found.end() + _MAX_DISTANCE]
    if after.lstrip()[:1] in ("{", "["):
        return _json_name(after)
    function = _FUNCTION.match(after)
    return function[1] if function else ""


def _tool_of_whole_text(text: str) -> str:
    """Return the tool of a text that is nothing but a call, as JSON or in Python syntax."""
    text = text.strip()
    if _OBJECT.match(text):
        is_call = '"arguments"' in text or '"parameters"' in text
        return _json_name(text[:_MAX_DISTANCE]) if is_call else ""
    return _python_function(text)


def _python_function(text: str) -> str:
    found = _PYTHON_CALL.match(text)
    is_closed = text.endswith(")]" if text.startswith("[") else ")")
    return found[1] if found and is_closed else ""


def _json_name(text: str) -> str:
    found = _JSON_NAME.search(text)
    return found[1] if found and _IS_NAME.fullmatch(found[1]) else ""
