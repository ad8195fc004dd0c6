"""The parts of a model's output: content, reasoning and tool calls.

    <think>Which city?</think>               ReasoningText("Which city?")
    Let me look.                             ContentText("Let me look.")
    <tool_call>{"name": "weather",           ToolCallStart(0, "call_…", "weather")
    "arguments": {"city": "Paris"}}          ToolCallArguments(0, '{"city": "Paris"}')

A parser knows the markers of one model family and returns these parts. The encoders in
`api_server/generation/encoders/` write the parts in the words of each API.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from api_server.metrics.metrics import Metrics
from api_server.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the answer itself. Consecutive parts continue the same text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text of the model's reasoning. Consecutive parts continue the same text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call. index: 0 for the first call of a choice; call_id: unique."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More arguments of a tool call. All parts of one index together are a JSON object."""

    index: int
    text: str


OutputPart = ContentText | ReasoningText | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Splits the text of one choice into parts while it is generated.

    The text arrives in deltas that may be cut anywhere, also inside a marker. No character is
    lost: text that turns out not to be a tool call is content. Only the start of a marker or of a
    call that a limit cuts is dropped.
    """

    def parse_delta(self, text: str) -> Sequence[OutputPart]:
        """Return the parts that are certain after this additional text."""

    def parse_end(self, *, is_cut: bool = False) -> Sequence[OutputPart]:
        """Return the parts of all text that was held back; no more text comes.

        is_cut: a limit ended the output, not the model or a stop string.
        """


class PlainTextParser:
    """Returns all text as content. Has no state, so PLAIN_TEXT serves all choices."""

    def parse_delta(self, text: str) -> Sequence[OutputPart]:
        return (ContentText(text),) if text else ()

    def parse_end(self, *, is_cut: bool = False) -> Sequence[OutputPart]:
        return ()


PLAIN_TEXT: Final = PlainTextParser()


def num_marker_characters(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may start `marker`.

    The text must not contain the whole marker.
    """
    position = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while position >= 0:
        if marker.startswith(text[position:]):
            return len(text) - position
        position = text.find(marker[0], position + 1)
    return 0


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Return the position of the first of these markers in a text, and the marker.

    Without one, return how many characters at the start of the text belong to none, and "": a
    marker may begin at the end of the text.
    """
    found = [(text.find(marker), marker) for marker in markers if marker in text]
    if found:
        return min(found)
    held = max((num_marker_characters(text, marker) for marker in markers), default=0)
    return len(text) - held, ""


TOOL_CALLS: Final = "tool_calls"
"""The finish_reason of a choice that ended by itself and calls a tool."""


class ChoiceParser:
    """Parses one choice for its response, and records whether it contains a tool call.

        text ── parser ─▶ reasoning, content ── cut at stop strings ── call_parser ─▶ content, calls

    metrics: counts the choice at its end, with or without a tool call; None for a request
    without tools.
    """

    def __init__(
        self,
        parser: OutputParser,
        metrics: Metrics | None = None,
        call_parser: OutputParser = PLAIN_TEXT,
    ) -> None:
        self._parser = parser
        self._call_parser = call_parser
        self._metrics = metrics
        self._num_content = 0  # characters that were returned
        self._buffer = ""  # content after these
        self.is_plain = parser is PLAIN_TEXT and call_parser is PLAIN_TEXT
        self.has_tool_calls = False

    def parse_delta(
        self, text: str, finish_reason: str | None = None, num_certain: int | None = None
    ) -> list[OutputPart]:
        """Return the parts of additional text. finish_reason: None unless the choice ends here.

        num_certain: see `ContentStops`; None for an answer without them.
        """
        parts = [*self._parser.parse_delta(text)]
        is_last = finish_reason is not None
        if is_last:
            parts += self._parser.parse_end(is_cut=finish_reason != "stop")
        if num_certain is not None:
            parts = self._cut_parts(parts, num_certain)
        if self._call_parser is not PLAIN_TEXT:
            parts = self._find_calls(parts)
            if is_last:
                parts += self._call_parser.parse_end(is_cut=finish_reason != "stop")
        if not self.has_tool_calls:
            self.has_tool_calls = any(isinstance(part, ToolCallStart) for part in parts)
        if is_last and self._metrics is not None:
            self._metrics.count_tool_parse(self.has_tool_calls)
        return parts

    def _find_calls(self, parts: Sequence[OutputPart]) -> list[OutputPart]:
        found: list[OutputPart] = []
        for part in parts:
            if isinstance(part, ContentText):
                found += self._call_parser.parse_delta(part.text)
            else:
                found.append(part)
        return found

    def _cut_parts(self, parts: Sequence[OutputPart], num_certain: int) -> list[OutputPart]:
        """Hold back content after `num_certain` characters; drop what comes after a stop string."""
        cut: list[OutputPart] = []
        for part in (*parts, None):
            if isinstance(part, ContentText):
                self._buffer += part.text
                continue
            num_new = num_certain - self._num_content
            certain, self._buffer = self._buffer[:num_new], self._buffer[num_new:]
            self._num_content += len(certain)
            if certain:
                cut.append(ContentText(certain))
            if part is None or self._buffer:
                return cut
            cut.append(part)
        return cut


class ContentStops:
    """Stop strings of an answer that may have reasoning.

    They are looked for in the content alone, which `parser` finds in the text; see
    `OutputFormat.new_reasoning_parser`. The text is returned whole, because the parser of the
    response (`ChoiceParser`) separates it again. num_certain: characters of content so far that
    belong to no stop string, nor to what may be the beginning of one; that parser holds back the
    content after them. A stop string does not match across another part, such as reasoning.

        <think>Which?</think>  Let me │ look.    stop string " look", num_certain 6
    """

    def __init__(self, stop_strings: StopStrings, parser: OutputParser) -> None:
        self._stop_strings = stop_strings
        self._parser = parser
        self.num_certain = 0

    def filter_text(self, piece: str, *, min_tokens_reached: bool) -> tuple[str, str | None]:
        """Return the text, and the stop string that its content completes or None."""
        return piece, self._find_stop(self._parser.parse_delta(piece), min_tokens_reached)

    def end_text(self, *, is_cut: bool, min_tokens_reached: bool) -> str | None:
        """Return the stop string that the end of the text completes. is_cut: see `OutputParser`."""
        stop = self._find_stop(self._parser.parse_end(is_cut=is_cut), min_tokens_reached)
        if stop is None:
            self.num_certain += len(self._stop_strings.pop_buffer())
        return stop

    def _find_stop(self, parts: Sequence[OutputPart], min_tokens_reached: bool) -> str | None:
        for part in parts:
            if isinstance(part, ContentText):
                certain, stop = self._stop_strings.filter_text(
                    part.text, min_tokens_reached=min_tokens_reached
                )
                if stop is not None:
                    self.num_certain += len(certain)
                    return stop
            else:
                certain = self._stop_strings.pop_buffer()
            self.num_certain += len(certain)
        return None
