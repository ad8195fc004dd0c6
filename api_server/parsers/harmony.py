"""Answers in OpenAI's harmony format (gpt-oss): parser, grammar and reasoning tokens.

    <|channel|>analysis<|message|>I should look.<|end|>                      ReasoningText
    <|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>    ContentText
    <|start|>assistant<|channel|>commentary to=functions.weather             ToolCallStart
      <|constrain|>json<|message|>{"city": "Paris"}<|call|>                  ToolCallArguments
    <|channel|>final<|message|>It is cold.<|return|>                         ContentText

A header that deviates is a call, too, if it names a tool of the request: with a recipient twice, a
word too many, words that are glued together, or without `functions.`. A tool's name without `to=`
counts only where calls stand, in commentary or without a channel. What is left of a header without
its `<|message|>` is dropped.

`<|call|>` and `<|return|>` end the answer. The detokenizer writes harmony's special tokens with
MARK before them, so that the same text in ordinary tokens stays text. The library `openai-harmony`
reads the header of each message; the rest of its parser is not used, because it encodes every delta
again (about 0.1 ms for a token) and raises an error for any deviation, after which it cannot
continue.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from api_server.parsers.output import (
    PLAIN_TEXT,
    ContentText,
    OutputParser,
    OutputPart,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.parsers.output_format import OutputFormat
from api_server.parsers.tool_calls import offered_tools, strict_field
from api_server.parsers.tools.base import json_argument_rule, quoted
from api_server.parsers.tools.call_parser import new_call_id, read_arguments
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.fields import IgnoredFields, errors_of
from api_server.protocol.json_schema import SchemaWork, json_rule
from api_server.protocol.tools import FunctionTool
from api_server.text.detokenizer import Detokenizer
from api_server.text.harmony import HarmonyEncoding
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError, ModelError, require
from proto.messages.grammar import GrammarSource, decoded

MARK: Final = "\ufdd0"
"""Stands before the text of a special token. A Unicode noncharacter: texts do not contain it."""
MARKERS: Final = ("start", "end", "message", "channel", "constrain", "return", "call")
END_MARKERS: Final = ("return", "call")
"""Special tokens that end an answer."""
_MARKER: Final = re.compile(rf"{MARK}<\|({'|'.join(MARKERS)})\|>")
_MAX_MARKER: Final = 1 + max(len(f"<|{name}|>") for name in MARKERS)
MAX_HEADER: Final = 256
"""Most characters of a header; what is longer is the content of a message without a header."""
_CHANNEL: Final = re.compile(r"<\|channel\|>[^<]*?(analysis|commentary|final)")
_BROKEN_HEADER: Final = re.compile(
    r"(?:(?:assistant)?(?:\s*to=[^\s<{]*)?\s*<\|channel\|>\s*(?:analysis|commentary|final)?"
    r"(?:\s*to=[^\s<{]*)?(?:\s*<\|constrain\|>\s*\w*|\s+(?:json|code)\b)?)+\s*"
)
"""A header at the start of a text, with which the text of the message was to begin."""
_TO_ASSISTANT: Final = re.compile(r"to\s*=\s*assistant")
"""Recipient of the result of a tool."""
_ANY_RECIPIENT: Final = re.compile(r"\bto\s*=")
_RECIPIENT: Final = re.compile(r"(?:to\s*=\s*(?:functions?\.)?|functions?\.)([A-Za-z0-9_.:/-]+)")
_GLUED: Final = re.compile(r"(?:analysis|commentary|final|json|code|to|assistant|[.:_-]?\d+)*+")
"""Possessive, as digits can be divided in exponentially many ways."""
_HEADER_WORDS: Final = frozenset({"assistant", "analysis", "commentary", "final", "json", "code"})
_SEPARATOR: Final = "\n\n"
"""Stands between the texts of two messages of the same kind."""


class HarmonyParser:
    """Parser of one choice.

    opening: the header of the message that the prompt leaves open, None if it leaves none open.
    A message without a valid header is content.
    """

    def __init__(
        self,
        encoding: HarmonyEncoding,
        opening: str | None,
        tool_names: Collection[str],
        *,
        is_shown: bool = True,
    ) -> None:
        self._encoding = encoding
        self._tool_names = tool_names
        self._is_shown = is_shown
        self._buffer = ""  # the start of a marker
        self._header: list[str] | None = []  # of the message; None after it
        self._header_length = 0
        self._kind: type[ReasoningText] | type[ContentText] = ContentText  # of the message's text
        self._called_tool: str | None = None  # by the message
        self._arguments: list[str] = []
        self._written: set[type] = set()  # kinds of text so far
        self._is_new_text = True  # no text of this message was returned
        self._num_calls = 0
        self._parts: list[OutputPart] = []
        if opening is not None:
            self._begin_message(opening)
            self._is_new_text = False

    @property
    def is_reasoning(self) -> bool:
        """The next text is reasoning."""
        return self._header is None and self._kind is ReasoningText

    def parse_delta(self, text: str) -> Sequence[OutputPart]:
        text = self._buffer + text
        self._buffer = ""
        position = 0
        while position < len(text):
            mark = text.find(MARK, position)
            if mark < 0:
                self._add_text(text[position:])
                break
            if mark > position:
                self._add_text(text[position:mark])
            found = _MARKER.match(text, mark)
            if found:
                self._add_marker(found[1])
                position = found.end()
            elif len(text) - mark < _MAX_MARKER:
                self._buffer = text[mark:]
                break
            else:
                position = mark + 1  # a mark alone has no meaning
        return self._pop_parts()

    def parse_end(self, *, is_cut: bool = False) -> Sequence[OutputPart]:
        self._buffer = ""
        if is_cut:
            self._called_tool, self._header = None, None
            self._arguments.clear()
        self._end_message()
        return self._pop_parts()

    def _add_text(self, text: str) -> None:
        if self._header is not None:
            room = MAX_HEADER - self._header_length
            self._header.append(text[:room])
            self._header_length += len(text[:room])
            if len(text) > room:  # the same text wherever it was cut
                self._reject_header()
                self._add_text(text[room:])
        elif self._called_tool is not None:
            self._arguments.append(text)
        else:
            self._write(text)

    def _add_marker(self, name: str) -> None:
        if name in ("end", "return", "call", "start"):
            self._end_message()
        elif self._header is None and name == "channel":  # the end of the last message is missing
            self._end_message()
            self._add_text("<|channel|>")
        elif self._header is None and self._called_tool is None:
            return  # a rest of a broken header
        elif self._header is not None and name == "message":
            self._begin_message("".join(self._header))
        elif name == "message" and not any("{" in text for text in self._arguments):
            self._arguments.clear()  # as above
        else:
            self._add_text(f"<|{name}|>")

    def _begin_message(self, header_text: str) -> None:
        name = self._encoding.called_tool(header_text)
        self._header = None
        is_analysis = last_channel(header_text) == "analysis"
        self._kind = ReasoningText if is_analysis else ContentText
        is_offered = name in self._tool_names
        self._called_tool = name if is_offered else named_tool(header_text, self._tool_names)
        self._is_new_text = True

    def _end_message(self) -> None:
        """End the message, or the text after a message; a header follows."""
        if self._header is not None:
            self._reject_header()
        if self._called_tool is not None:
            self._add_call(self._called_tool, "".join(self._arguments).strip() or "{}")
        self._called_tool = None
        self._arguments.clear()
        self._header, self._header_length = [], 0

    def _reject_header(self) -> None:
        """Treat text that is not a header, or follows one without its end, as that of a message."""
        text = "".join(self._header or ())
        found = _BROKEN_HEADER.match(text)
        self._begin_message(found[0] if found else "")
        text = text[found.end() :] if found else text.removeprefix("assistant")
        if text.strip():
            self._add_text(text)

    def _add_call(self, name: str, arguments: str) -> None:
        found = read_arguments(arguments)
        if found is None:
            self._write(arguments)
            return
        self._parts.append(ToolCallStart(self._num_calls, new_call_id(), name))
        self._parts.append(ToolCallArguments(self._num_calls, found))
        self._num_calls += 1

    def _write(self, text: str) -> None:
        if self._kind is ReasoningText and not self._is_shown:
            return
        if self._is_new_text and self._kind in self._written:
            text = _SEPARATOR + text
        self._is_new_text = False
        self._written.add(self._kind)
        self._parts.append(self._kind(text))

    def _pop_parts(self) -> Sequence[OutputPart]:
        parts, self._parts = self._parts, []
        return parts


def last_channel(header: str) -> str:
    """Return the channel that a header names last; empty for none."""
    channels: list[str] = _CHANNEL.findall(header)
    return channels[-1] if channels else ""


def named_tool(header: str, tool_names: Collection[str]) -> str | None:
    """Return the tool to which a message with a malformed header goes, None if there is none.

     to=functions.find<|channel|>commentary to=functions.find    find
    <|channel|>commentary to=functions.findjson                  find
    <|channel|>commentary find                                   find
    <|channel|>commentary to=browser find                        none: another recipient
    <|channel|>analysis find                                     none: reasoning
    """
    if _TO_ASSISTANT.search(header):
        return None
    longest_first = sorted(tool_names, key=len, reverse=True)
    for recipient in reversed(_RECIPIENT.findall(header)):
        for name in longest_first:
            if recipient.startswith(name) and _GLUED.fullmatch(recipient, len(name)):
                return name
    if _ANY_RECIPIENT.search(header) or last_channel(header) not in ("", "commentary"):
        return None
    words = re.split(r"<\|\w+\|>|\s+", header)
    named = [word for word in words if word in tool_names and word not in _HEADER_WORDS]
    return named[-1] if named else None


class HarmonyTokenCounter:
    """A detokenizer that counts the tokens of the reasoning that passes through it."""

    def __init__(self, detokenizer: Detokenizer, parser: HarmonyParser) -> None:
        self._detokenizer = detokenizer
        self._parser = parser
        self.num_tokens = 0

    def decode_token(self, token_id: int) -> str:
        text = self._detokenizer.decode_token(token_id)
        was_reasoning = self._parser.is_reasoning
        self._parser.parse_delta(text)
        if was_reasoning and self._parser.is_reasoning:
            self.num_tokens += 1
        return text

    def flush_text(self) -> str:
        return self._detokenizer.flush_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyOutput(OutputFormat):
    """How the choices of one request to a harmony model are parsed.

    opening: see `HarmonyParser`. tool_names: of the tools that the answer may call.
    is_shown: the response contains the reasoning. is_raw: the response contains the answer as the
    model wrote it.
    """

    harmony: "Harmony"
    opening: str | None = None
    tool_names: Sequence[str] = ()
    is_shown: bool = True
    is_raw: bool = False

    @property
    def has_tools(self) -> bool:
        return bool(self.tool_names)

    @property
    def markers(self) -> dict[int, str]:
        return dict(self.harmony.markers)

    def new_parser(self) -> OutputParser:
        return PLAIN_TEXT if self.is_raw else self._new_parser(is_shown=self.is_shown)

    def new_reasoning_parser(self) -> OutputParser:
        """Return a parser that finds the calls, too: they are messages of their own."""
        return self.new_parser()

    def new_counter(self, detokenizer: Detokenizer) -> HarmonyTokenCounter | None:
        if self.is_raw:
            return None
        return HarmonyTokenCounter(detokenizer, self._new_parser(is_shown=False))

    def _new_parser(self, *, is_shown: bool) -> HarmonyParser:
        return HarmonyParser(
            self.harmony.encoding, self.opening, self.tool_names, is_shown=is_shown
        )


def open_header(prompt: str) -> str | None:
    """Return the header of the message that a prompt leaves open within its text.

    …<|end|><|start|>assistant                                       None: a header follows
    …<|end|><|start|>assistant<|channel|>final<|message|>It is       assistant<|channel|>final
    """
    last = prompt[prompt.rfind("<|start|>") :].removeprefix("<|start|>")
    header, found, content = last.partition("<|message|>")
    is_open = found and not any(f"<|{name}|>" in content for name in ("end", *END_MARKERS))
    return header if is_open else None


@dataclass(frozen=True, slots=True)
class Harmony:
    """What a front end needs for a model of the harmony format.

    token_ids: marker → id. markers: id → text by which the parser recognises it.
    """

    encoding: HarmonyEncoding
    token_ids: Mapping[str, int]
    markers: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def for_tokenizer(cls, encoding: HarmonyEncoding, tokenizer: ModelTokenizer) -> "Harmony":
        """Raises ModelError for a tokenizer without harmony's special tokens."""
        token_ids = {}
        for name in MARKERS:
            token_id = tokenizer.special_id(f"<|{name}|>")
            if token_id is None:
                raise ModelError(
                    f"the tokenizer has no special token <|{name}|>, which the harmony format needs"
                )
            token_ids[name] = token_id
        markers = {token_id: f"{MARK}<|{name}|>" for name, token_id in token_ids.items()}
        return cls(encoding, token_ids, markers)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, also if the model's configuration does not list them."""
        return tuple(self.token_ids[name] for name in END_MARKERS)

    def output_format(self, request: ChatCompletionRequest, prompt: str) -> HarmonyOutput:
        """Return how the answer to a prompt is parsed."""
        return HarmonyOutput(
            harmony=self,
            opening=open_header(prompt),
            tool_names=[tool.name for tool in request.listed_tools],
            is_shown=request.include_reasoning,
            is_raw=not request.skip_special_tokens,
        )

    def answer_grammar(
        self,
        request: ChatCompletionRequest,
        text_grammar: GrammarSource | None,
        ignored: IgnoredFields,
        work: SchemaWork,
    ) -> GrammarSource | None:
        """Return the grammar of an answer with all of its messages; None for any text.

        text_grammar: the grammar that the request demands of its text, if any; it applies to the
        final message. work: of the request's schemas. Raises InvalidRequestError.
        """
        tools = request.callable_tools
        effort = request.chat_template_kwargs.get("reasoning_effort", request.reasoning_effort)
        budget = 0 if effort == "none" else request.thinking_token_budget
        has_strict = any(tool.strict for tool in tools)
        if request.continue_final_message:
            require(not request.must_call, "tool_choice", "does not go with continue_final_message")
            return text_grammar
        if text_grammar is None and budget is None and not request.must_call and not has_strict:
            return None
        offered = offered_tools(request, ignored, work, all_schemas=False)
        if text_grammar is not None:
            field_path = text_grammar.field
        elif has_strict or request.must_call:
            field_path = strict_field(offered)
        else:
            field_path = "thinking_token_budget" if budget else "reasoning_effort"
        rules = self._rules(offered, text_grammar, budget, work, must_call=request.must_call)
        if not request.add_generation_prompt:
            rules[0] = f'start: {self._token("start")} "assistant" answer'
        source = GrammarSource("grammar", "\n".join(rules), field=field_path)
        with errors_of(field_path):
            source.validate()
        return source

    def _rules(
        self,
        tools: Sequence[FunctionTool],
        text_grammar: GrammarSource | None,
        budget: int | None,
        work: SchemaWork,
        *,
        must_call: bool,
    ) -> list[str]:
        """Return Lark rules for everything after `<|start|>assistant`."""
        channel, message, constrain = map(self._token, ("channel", "message", "constrain"))
        next_message = f'{self._token("end")} {self._token("start")} "assistant"'
        opening = []
        rules = ["start: answer", r"TEXT: /(.|\n)*/"]
        if budget != 0:
            limit = "" if budget is None else f"[max_tokens={budget}]"
            opening.append("analysis?")
            rules += [
                f'analysis: {channel} "analysis" {message} reasoning {next_message}',
                f"reasoning{limit}: TEXT",
            ]
        if tools and text_grammar is None:
            opening.append("preamble?")
            rules.append(f'preamble: {channel} "commentary" {message} TEXT {next_message}')
        last = []
        if not must_call:
            last.append("final")
            rules.append(f'final: {channel} "final" {message} text')
            rules += ["text: TEXT"] if text_grammar is None else _text_rules(text_grammar, work)
        if tools:
            last.append("call")
            calls = " | ".join(
                f'{quoted(f"{tool.name} ")} {constrain}? "json" {message} arguments_{index}'
                for index, tool in enumerate(tools)
            )
            rules.append(f'call: {channel} "commentary to=functions." ({calls})')
            for index, tool in enumerate(tools):
                rules.append(json_argument_rule(f"arguments_{index}", tool, work))
        return [*rules, f"answer: {' '.join(opening)} ({' | '.join(last)})"]

    def _token(self, name: str) -> str:
        """Return a special token in Lark."""
        return f"<[{self.token_ids[name]}]>"


def _text_rules(grammar: GrammarSource, work: SchemaWork) -> list[str]:
    """Return the rule `text` and those that it needs, for the text of the final message."""
    if grammar.kind == "json_schema":
        with errors_of(grammar.field):
            return [json_rule("text", decoded(grammar.source), work, compact=grammar.compact)]
    if grammar.kind == "choice":
        return [f"text: {' | '.join(map(quoted, decoded(grammar.source)))}"]
    if grammar.kind == "regex":
        escaped = re.sub(
            r"(\\.)|/|\n",
            lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]],
            grammar.source,
            flags=re.DOTALL,
        )
        return ["text: ANSWER", f"ANSWER: /{escaped}/"]
    raise InvalidRequestError(
        f"{grammar.field} is not available for a model of the harmony format, whose answer is more "
        "than the text that the grammar describes: use a JSON schema, a regex or a choice",
        grammar.field,
    )
