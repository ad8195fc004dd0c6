"""Reasoning at the beginning of an answer: the formats of the models, and their parser.

    prompt  …<think>\\n  │  Which city?\\n</think>\\n\\n  Let me look.
                         │  ReasoningText             what the parser of tool calls reads

Some models write markers around the rest, too: <answer>…</answer>.

A call ends reasoning that has no end marker (`CallsInReasoning`).

Whitespace at both ends of the reasoning, and line breaks after it, belong to the markers and are
dropped. A new format is a line in `REASONING_FORMATS`, with a class derived from `ReasoningFormat`
if it is more than two markers.
"""

import enum
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from api_server.parsers.output import (
    OutputParser,
    OutputPart,
    ReasoningText,
    ToolCallStart,
    find_marker,
    num_marker_characters,
)
from api_server.text.detokenizer import Detokenizer
from proto.messages.sampling_params import BLANKS, MAX_BLANKS
from proto.settings.config import ReasoningParserName


class OutputStart(enum.Enum):
    """What the output starts with. UNKNOWN: its first characters decide."""

    REASONING = 0
    UNKNOWN = 1
    CONTENT = 2


@dataclass(frozen=True, slots=True)
class CallsInReasoning:
    """How a call that begins within reasoning is recognised.

    tokens: markers of calls that are special tokens; one of them ends the reasoning at once.
    texts: other markers. One of them ends the reasoning if it begins a line outside of a code
    block, a call of a tool of the request follows, and the reasoning has no end marker later:
    otherwise the model only quotes a call. new_parser: makes the parser of calls.
    """

    tokens: Sequence[str]
    texts: Sequence[str]
    tool_names: Collection[str]
    new_parser: Callable[[], OutputParser]

    def is_call(self, parts: Sequence[OutputPart]) -> bool:
        """Return whether the output of the parser begins with a call of a tool of the request."""
        first = parts[0] if parts else None
        return isinstance(first, ToolCallStart) and first.name in self.tool_names


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes its reasoning: between two markers, at the beginning of an answer.

    start, end: the markers; both empty for a model without reasoning. starts_inside: the model
    starts with reasoning and writes no start marker. answer_start, answer_end: markers around the
    rest of the output, if any. template_markers: a chat template that contains all strings of one
    of these groups belongs to this format; empty if `auto` must not choose it.
    """

    start: str = ""
    end: str = ""
    starts_inside: bool = False
    answer_start: str = ""
    answer_end: str = ""
    template_markers: Sequence[Sequence[str]] = ()

    @property
    def has_reasoning(self) -> bool:
        return bool(self.end)

    def output_start(self, prompt: str, continued: str) -> OutputStart:
        """Return what the output of a prompt starts with.

        Only the end of the prompt counts, which the template or the model wrote. continued: text
        of the last message that the output continues; empty for a new message.
        """
        if not self.has_reasoning:
            return OutputStart.CONTENT
        if continued.strip():
            is_open = continued.rfind(self.start) > continued.rfind(self.end)
            return OutputStart.REASONING if is_open else OutputStart.CONTENT
        tail = prompt[-len(self.end) - MAX_BLANKS :].rstrip()
        if tail.endswith(self.start):
            return OutputStart.REASONING
        if tail.endswith(self.end):
            return OutputStart.CONTENT
        return OutputStart.REASONING if self.starts_inside else OutputStart.UNKNOWN

    def new_parser(
        self,
        output_start: OutputStart,
        content_parser: OutputParser,
        *,
        is_shown: bool,
        calls: CallsInReasoning | None = None,
    ) -> OutputParser:
        """Return a parser for one choice; `content_parser` receives the text after the reasoning.

        is_shown: return the reasoning too; otherwise it is dropped. calls: None without tools.
        """
        if self.answer_start:
            content_parser = AnswerParser(self.answer_start, self.answer_end, content_parser)
        if output_start is OutputStart.CONTENT:
            return content_parser
        return ReasoningParser(self, output_start, content_parser, is_shown=is_shown, calls=calls)


NO_REASONING: Final = ReasoningFormat()
_THINK: Final = ReasoningFormat("<think>", "</think>", template_markers=(("<think>", "</think>"),))
HARMONY: Final = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    template_markers=(("<|channel|>analysis<|message|>",),),
)
"""Of models with channels, whose whole output `api_server/parsers/harmony.py` parses."""
_INSIDE: Final = ReasoningFormat(
    "<think>", "</think>", starts_inside=True, template_markers=(("</think>",),)
)

REASONING_FORMATS: Final[Mapping[ReasoningParserName, ReasoningFormat]] = {
    "harmony": HARMONY,
    "hunyuan_a13b": ReasoningFormat(
        "<think>",
        "</think>",
        answer_start="<answer>",
        answer_end="</answer>",
        template_markers=(("<think>", "<answer>"), ("<think>", "<|extra_0|>")),
    ),
    "granite33": ReasoningFormat(
        "<think>",
        "</think>",
        answer_start="<response>",
        answer_end="</response>",
        template_markers=(("<think>", "<response>"),),
    ),
    "qwen3": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "holo2": _THINK,
    "smollm3": _THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", template_markers=(("[THINK]", "[/THINK]"),)),
    "seed_oss": ReasoningFormat(
        "<seed:think>", "</seed:think>", template_markers=(("<seed:think>", "</seed:think>"),)
    ),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    # A template that only removes reasoning, and never opens it, is of a model that starts with it.
    "deepseek_r1": _INSIDE,
    "minimax_m2": _INSIDE,
    "step3": _INSIDE,
}
"""Value of --reasoning-parser → format, in the order in which `auto` compares templates."""


def reasoning_format(name: ReasoningParserName, template: str | None) -> ReasoningFormat:
    """Return the format by its name; "auto" detects it from the source of the chat template."""
    if name != "auto":
        return REASONING_FORMATS.get(name, NO_REASONING)
    if template is not None:
        for candidate in REASONING_FORMATS.values():
            groups = candidate.template_markers
            if any(all(marker in template for marker in group) for group in groups):
                return candidate
    return NO_REASONING


class _State(enum.Enum):
    """What a ReasoningParser or an AnswerParser is reading.

    START_MARKER  a start marker, or text that shows that there is none
    LEADING       whitespace between the start marker and the text
    INSIDE        text between the markers
    TRAILING      whitespace after the end marker
    CONTENT       text without markers
    """

    START_MARKER = 0
    LEADING = 1
    INSIDE = 2
    TRAILING = 3
    CONTENT = 4


_FENCE: Final = "```"
_FENCE_LINE: Final = re.compile(r"^ {0,3}```", re.M)
_LINE_START: Final = re.compile(r"\n {0,3}\Z")
"""What stands before text that begins a line; with more blanks it would be code."""
_INDENT: Final = 4


class ReasoningParser:
    """Parser of reasoning between two markers, followed by content for another parser.

    is_shown: return the reasoning; otherwise it is dropped.
    """

    def __init__(
        self,
        reasoning_format: ReasoningFormat,
        output_start: OutputStart,
        content_parser: OutputParser,
        *,
        is_shown: bool = True,
        calls: CallsInReasoning | None = None,
    ) -> None:
        self._format = reasoning_format
        self._calls = calls
        self._output_start = output_start
        self._content_parser = content_parser
        self._is_shown = is_shown
        has_none = output_start is OutputStart.CONTENT
        self._state = _State.CONTENT if has_none else _State.START_MARKER
        self._buffer = ""  # an incomplete start marker, or whitespace and an incomplete end marker
        self._markers = [reasoning_format.end]  # that matter within the reasoning
        if calls:
            self._markers += [*calls.tokens, *calls.texts, _FENCE]
        self._any_marker = re.compile("|".join(map(re.escape, self._markers)))
        self._before = "\n"  # the end of the reasoning so far, as long as an indented line break
        self._is_in_code = False  # the reasoning so far ends within a code block
        self._call_parser: OutputParser | None = None  # of a call that is perhaps only quoted
        self._call_parts: list[OutputPart] = []
        self._call_text: list[str] = []  # whitespace before that call, and all text from it on
        self._num_parsed = 0  # pieces of this text, in whole lines

    def parse_delta(self, text: str) -> Sequence[OutputPart]:
        parts: list[OutputPart] = []
        if self._state is _State.START_MARKER:
            text = self._read_start_marker(text)
        if self._state is _State.LEADING:
            text = text.lstrip()
            if text:
                self._state = _State.INSIDE
        while self._state is _State.INSIDE and text:
            read = self._read_quotation if self._call_parser else self._read_reasoning
            text = read(text, parts)
        if self._state is _State.TRAILING:
            text = text.lstrip("\n")
            if text:
                self._state = _State.CONTENT
        if self._state is _State.CONTENT and text:
            parts += self._content_parser.parse_delta(text)
        return parts

    def parse_end(self, *, is_cut: bool = False) -> Sequence[OutputPart]:
        parts: list[OutputPart] = []
        if self._call_parser:
            self._end_quotation(parts, is_cut=is_cut)
        is_undecided = self._state is _State.START_MARKER
        if is_cut and self._buffer.strip() and not _FENCE.startswith(self._buffer.strip()):
            self._buffer = ""  # the start of a marker
        if is_undecided and self._output_start is OutputStart.UNKNOWN:
            parts += self._content_parser.parse_delta(self._buffer) if self._buffer else ()
        else:
            rest = self._buffer.lstrip(BLANKS) if is_undecided else self._buffer
            self._add_reasoning(_trimmed(rest), parts)
        self._buffer = ""
        return [*parts, *self._content_parser.parse_end(is_cut=is_cut)]

    def _read_start_marker(self, text: str) -> str:
        """Return the text after the start marker, or all text if there is none.

        Returns "" and holds the text back while that is undecided. The engine decides by the same
        rule (engine_core/structured_output/matchers.py).
        """
        self._buffer += text
        unindented = self._buffer.lstrip(BLANKS)
        if len(self._buffer) - len(unindented) <= MAX_BLANKS:
            if unindented.startswith(self._format.start):
                self._state, self._buffer = _State.LEADING, ""
                return unindented[len(self._format.start) :]
            if self._format.start.startswith(unindented):
                return ""
        starts_inside = self._output_start is OutputStart.REASONING
        self._state = _State.LEADING if starts_inside else _State.CONTENT
        text, self._buffer = self._buffer, ""
        return text

    def _read_reasoning(self, text: str, parts: list[OutputPart]) -> str:
        """Add reasoning to `parts`; return the text after it: an answer, or the start of a call.

        thought thought \\n \\n </thi      held back: what may belong to the end marker
        ── added ─────┘ └─ held ──┘
        """
        text, self._buffer = self._buffer + text, ""
        position = 0
        while found := self._any_marker.search(text, position):
            marker, position = found[0], found.start()
            if marker == self._format.end:
                self._state = _State.TRAILING
                self._add_reasoning(_trimmed(text[:position]), parts)
                return text[found.end() :]
            assert self._calls is not None
            length = len(_trimmed(text[:position]))
            if marker in self._calls.tokens:
                self._state = _State.CONTENT
                self._add_reasoning(text[:length], parts)
                return text[position:]
            before = f"{self._before}{text[max(0, position - _INDENT) : position]}"
            if _LINE_START.search(before):
                self._is_in_code ^= marker == _FENCE
                if marker != _FENCE and not self._is_in_code:
                    self._add_reasoning(text[:length], parts)
                    self._call_parser = self._calls.new_parser()
                    self._call_text, self._num_parsed = [text[length:position]], 1
                    return text[position:]
            position = found.end()
        held = max(num_marker_characters(text, marker) for marker in self._markers)
        length = len(_trimmed(text[: len(text) - held]))
        self._add_reasoning(text[:length], parts)
        self._buffer = text[length:]
        return ""

    def _read_quotation(self, text: str, parts: list[OutputPart]) -> str:
        """Hold back text from the start of a call on, and return text that follows its end.

        An end marker, or other text than a call, shows that it was reasoning.
        """
        assert self._calls is not None
        assert self._call_parser is not None
        end, start = self._format.end, 0
        while start < len(text):
            line_end = text.find("\n", start) + 1
            line = text[start : line_end or len(text)]
            start += len(line)
            before = "".join(self._call_text[-len(end) :])[-len(end) + 1 :]
            position = f"{before}{line}".find(end)
            self._call_text.append(line)
            if position >= 0:
                whole = "".join(self._call_text)
                after = whole[len(whole) - len(before) - len(line) + position :]
                self._drop_quotation(parts, len(whole) - len(after))
                return f"{after}{text[start:]}"
            if line_end:
                self._call_parts += self._call_parser.parse_delta(self._unparsed_text())
                if self._call_parts and not self._calls.is_call(self._call_parts):
                    self._drop_quotation(parts, None)
                    return text[start:]
        return ""

    def _unparsed_text(self) -> str:
        text = "".join(self._call_text[self._num_parsed :])
        self._num_parsed = len(self._call_text)
        return text

    def _drop_quotation(self, parts: list[OutputPart], length: int | None) -> None:
        """Continue with the reasoning after `length` characters of the text that was held back."""
        text = "".join(self._call_text)[:length]
        kept = len(_trimmed(text))
        if len(_FENCE_LINE.findall(text)) % 2:
            self._is_in_code = not self._is_in_code
        self._add_reasoning(text[:kept], parts)
        self._buffer = text[kept:]
        self._call_parser = None
        self._call_parts.clear()
        self._call_text.clear()

    def _end_quotation(self, parts: list[OutputPart], *, is_cut: bool) -> None:
        """End the output: what a limit cuts is neither a call nor reasoning."""
        assert self._calls is not None
        assert self._call_parser is not None
        if not is_cut:
            self._call_parts += self._call_parser.parse_delta(self._unparsed_text())
            self._call_parts += self._call_parser.parse_end()
            if self._calls.is_call(self._call_parts):
                parts += self._content_parser.parse_delta("".join(self._call_text[1:]))
            else:
                self._drop_quotation(parts, None)

    def _add_reasoning(self, text: str, parts: list[OutputPart]) -> None:
        self._before = f"{self._before}{text}"[-_INDENT:]
        if text and self._is_shown:
            parts.append(ReasoningText(text))


class AnswerParser:
    """Parser of an answer that may stand between two markers, which are dropped.

    Whitespace before the first marker and line breaks within both belong to the markers. An answer
    that does not begin with the first marker is passed on as it is.
    """

    def __init__(self, start: str, end: str, content_parser: OutputParser) -> None:
        self._start = start
        self._end = end
        self._content_parser = content_parser
        self._state = _State.START_MARKER
        self._buffer = ""  # an incomplete marker, with the whitespace before it

    def parse_delta(self, text: str) -> Sequence[OutputPart]:
        text = self._buffer + text
        self._buffer = ""
        if self._state is _State.START_MARKER:
            unindented = text.lstrip(BLANKS)
            is_near = len(text) - len(unindented) <= MAX_BLANKS
            if is_near and unindented.startswith(self._start):
                self._state, text = _State.LEADING, unindented[len(self._start) :]
            elif is_near and self._start.startswith(unindented):
                self._buffer = text
                return ()
            else:
                self._state = _State.CONTENT
        if self._state is _State.LEADING:
            text = text.lstrip("\n")
            self._state = _State.INSIDE if text else self._state
        if self._state is _State.INSIDE:
            text = self._read_answer(text)
        elif self._state is _State.TRAILING:
            text = text.lstrip()
            self._state = _State.CONTENT if text else self._state
        return self._content_parser.parse_delta(text) if text else ()

    def _read_answer(self, text: str) -> str:
        """Return the text without the end marker; hold back what may be a part of the marker."""
        answer, found, after = text.partition(self._end)
        if found:
            after = after.lstrip()
            self._state = _State.CONTENT if after else _State.TRAILING
            return f"{_without_line_breaks(answer)}{after}"
        body = text[: len(text) - num_marker_characters(text, self._end)]
        length = len(_without_line_breaks(body))
        self._buffer = text[length:]
        return text[:length]

    def parse_end(self, *, is_cut: bool = False) -> Sequence[OutputPart]:
        rest = self._buffer
        if is_cut and rest.strip():
            rest = ""  # the start of a marker
        parts = [*(self._content_parser.parse_delta(rest) if rest else ())]
        return [*parts, *self._content_parser.parse_end(is_cut=is_cut)]


def _without_line_breaks(text: str) -> str:
    """Return the text without line breaks at its end, of which at most MAX_BLANKS are removed."""
    return text[: max(len(text.rstrip("\n")), len(text) - MAX_BLANKS)]


def _trimmed(text: str) -> str:
    """Return the text without trailing whitespace, of which at most MAX_BLANKS are removed."""
    return text[: max(len(text.rstrip()), len(text) - MAX_BLANKS)]


class TokenCounter(Detokenizer, Protocol):
    """A detokenizer that counts the tokens of the reasoning that passes through it."""

    @property
    def num_tokens(self) -> int: ...


_MAX_TOKENS: Final = 256
"""More than the characters of any marker plus some tokens that have no text."""


class ReasoningTokenCounter:
    """A detokenizer that counts the tokens of the reasoning that passes through it.

    output_start: not CONTENT. call_tokens: special tokens that end the reasoning, too.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        reasoning_format: ReasoningFormat,
        output_start: OutputStart,
        call_tokens: Sequence[str] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._format = reasoning_format
        self._ends = (reasoning_format.end, *call_tokens)
        self._has_reasoning = output_start is OutputStart.REASONING
        self._at_start_marker = True
        self._tail = ""  # end of the text, as long as an incomplete marker can be
        self._num_characters = 0
        self._tokens: deque[tuple[int, int]] = deque(maxlen=_MAX_TOKENS)  # offsets of their texts
        self._num_tokens = 0
        self._is_finished = False

    @property
    def num_tokens(self) -> int:
        return self._num_tokens if self._has_reasoning else 0

    def decode_token(self, token_id: int) -> str:
        text = self._detokenizer.decode_token(token_id)
        if not self._is_finished:
            start = self._num_characters
            self._num_characters += len(text)
            self._tokens.append((start, self._num_characters))
            self._num_tokens += 1
            self._tail += text
            self._find_end()
        return text

    def flush_text(self) -> str:
        return self._detokenizer.flush_text()

    def _find_end(self) -> None:
        if self._at_start_marker and not self._has_started():
            return
        position, marker = find_marker(self._tail, self._ends)
        if not marker:
            self._tail = self._tail[position:]
            return
        end_offset = self._num_characters - len(self._tail) + position
        # A token without text just before the marker is part of the reasoning.
        self._num_tokens -= sum(
            first >= end_offset and last > end_offset for first, last in self._tokens
        )
        self._is_finished = True

    def _has_started(self) -> bool:
        """Decide whether the text has reasoning; return False if it has none or is undecided."""
        unindented, start = self._tail.lstrip(BLANKS), self._format.start
        if len(self._tail) - len(unindented) <= MAX_BLANKS:
            if unindented.startswith(start):
                self._has_reasoning, self._at_start_marker = True, False
                self._tail = unindented[len(start) :]
                self._num_tokens = int(bool(self._tail))
                return True
            if start.startswith(unindented):
                return False
        self._at_start_marker = False
        self._is_finished = not self._has_reasoning
        return self._has_reasoning
