"""What a chat request that offers tools asks of the text of its answer.

    tool_choice          grammar
    auto                 none
    auto, and a strict   behind the mark of a call; where calls have no mark, from the start, beside
    tool or at most      any text that is no call
    one call
    required, a name     from the start: one call, or several
    none                 that of the request, as without tools

Owns that table. The formats are in outputs/tool_parsers/.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from api_server.parsers.parts import PLAIN_TEXT, PartsParser
from api_server.parsers.tools.common import new_call_id
from api_server.parsers.tools.formats import (
    DEFAULT,
    FORMATS,
    MOST_CALLS,
    CallGrammar,
    CallRules,
    OfferedTool,
    ToolFormat,
    format_of,
)
from api_server.parsers.tools.schemas import json_rule
from api_server.protocol.tools import ToolFields
from api_server.text.chat_template import Conversation, TemplateFacts
from api_server.text.tokenizer import ModelTokenizer
from proto.config import ToolCallParser
from proto.errors import InvalidRequestError
from proto.grammar import GrammarSource, decoded

# Tools as text, for a chat template without tools.
#
#     system      You are helpful.            system      You are helpful.
#                                                         # Tools … one JSON object a line …
#     user        Is it cold?                 user        Is it cold?
#     assistant   calls weather          ─▶   assistant   <tool_call>{"name": "weather", …
#     tool        3 degrees                   user        <tool_response>3 degrees</tool_response>


Message = dict[str, Any]


def with_told_tools(conversation: Conversation, written: ToolFormat) -> Conversation:
    """The conversation with tools, calls and answers to them as text. written: how calls are."""
    messages: list[Message] = []
    role = ""
    for message in conversation.messages:
        if message["role"] != "tool":
            messages.append(_with_calls(message, written))
        elif role == "tool":  # answers to calls that were made together are one message
            messages[-1]["content"] += f"\n{_response(message)}"
        else:
            messages.append({"role": "user", "content": _response(message)})
        role = message["role"]
    if conversation.tools:
        messages = _with_tools(messages, conversation.tools, written)
    return replace(conversation, messages=messages, tools=None)


def _with_tools(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], written: ToolFormat
) -> list[Message]:
    """In the system message, which becomes the first one where there is none."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = written.written([("function-name", '{"argument-name": "value"}')])
    told = (
        "# Tools\n\nYou may call one or more functions. Their signatures are within <tools> and "
        f"</tools>:\n<tools>\n{lines}\n</tools>\n\nTo call a function answer with:\n{example}"
    )
    if messages and messages[0]["role"] in ("system", "developer"):
        first, *rest = messages
        return [{**first, "content": f"{_text(first['content'])}\n\n{told}"}, *rest]
    return [{"role": "system", "content": told}, *messages]


def _with_calls(message: Mapping[str, Any], written: ToolFormat) -> Message:
    """What was called is a part of what was said."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    called = [call["function"] for call in calls]
    pairs = [(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in called]
    said = [text for text in (_text(message["content"]), written.written(pairs)) if text]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(said)}


def _response(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{_text(message['content'])}\n</tool_response>"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


@dataclass(frozen=True, slots=True)
class Calling:
    """How an answer may call tools.

    format: None where it cannot. make_parser: for the text of one choice. grammar: of the answer,
    None for any text. marks: special tokens that the parser has to see, id to text.
    """

    format: ToolFormat | None
    make_parser: Callable[[], PartsParser]
    grammar: GrammarSource | None
    marks: Mapping[int, str] = field(default_factory=dict)


def no_calling(grammar: GrammarSource | None) -> Calling:
    """Of an answer that is text. grammar: what the request says it has to be."""
    return Calling(None, lambda: PLAIN_TEXT, grammar)


@dataclass(frozen=True, slots=True)
class ToolCaller:
    """What a model can. wanted: by the operator. template: its source; facts: what that reads."""

    wanted: ToolCallParser
    template: str | None
    facts: TemplateFacts
    tokens: ModelTokenizer

    @property
    def knows_tools(self) -> bool:
        """Whether the template reads the tools."""
        return "tools" in self.facts.names

    @property
    def format(self) -> ToolFormat | None:
        """How the model writes calls; None where that is not known."""
        return format_of(self.wanted, self.template, knows_tools=self.knows_tools)

    def shown(self, request: ToolFields) -> list[dict[str, Any]] | None:
        """The tools for the template; None where there are none, or none may be called."""
        if not request.callable_tools:
            return None
        return [tool.for_template() for tool in request.tools]

    def with_tools_as_text(self, conversation: Conversation) -> Conversation:
        """As the template can take it."""
        if self.knows_tools:
            return conversation
        return with_told_tools(conversation, self.format or FORMATS[DEFAULT])

    def calling(self, request: ToolFields, own: GrammarSource | None) -> Calling:
        """own: what the request says its text has to be.

        Raises InvalidRequestError for tools that cannot be called so.
        """
        tools = request.callable_tools
        if not tools:
            return no_calling(own)
        written = self.format
        if written is None:
            raise InvalidRequestError(
                "how this model calls tools is not known: its chat template is of none of the "
                "formats that --tool-call-parser takes",
                "tools",
            )
        found = {mark: self.tokens.special_id(mark) for mark in written.marks}
        token_ids = {mark: token_id for mark, token_id in found.items() if token_id is not None}
        offered = [
            OfferedTool(tool.name, tool.parameters, tool.strict or request.must_call, tool.field)
            for tool in tools
        ]
        rules = CallRules(offered, 1 if request.calls_once else MOST_CALLS, token_ids)
        parser = partial(written.parser, [tool.name for tool in request.tools], new_call_id)
        grammar = _grammar(request, written, rules, own)
        marks = {token_id: mark for mark, token_id in token_ids.items()}
        return Calling(written, parser, grammar, marks)


def _grammar(
    request: ToolFields, written: ToolFormat, rules: CallRules, own: GrammarSource | None
) -> GrammarSource | None:
    if request.must_call:
        if own is not None:
            raise InvalidRequestError(
                f"{own.field} does not go with a tool_choice that asks for a call", own.field
            )
        return _source(["start: calls"], written.grammar(rules), rules)
    if own is not None:
        return _beside(own, written.grammar(rules), rules)
    if not request.calls_once and not any(tool.strict for tool in rules.tools):
        return None
    grammar = written.grammar(rules)
    if not grammar.trigger:
        return _source(["start: calls | FREE", f"FREE: {grammar.free}"], grammar, rules)
    return _source(["start: behind"], grammar, rules, trigger=grammar.trigger)


def _beside(own: GrammarSource, grammar: CallGrammar, rules: CallRules) -> GrammarSource:
    """Calls, or the text that the request asks for."""
    if own.kind != "json_schema" or not grammar.trigger:
        raise InvalidRequestError(
            f"beside tools {own.field} takes a JSON schema, and a model that marks its calls; "
            "tool_choice none lets it be",
            own.field,
        )
    answer = f"answer: {json_rule(decoded(own.source))}"
    return _source(["start: calls | answer", answer], grammar, rules)


def _source(
    start: list[str], grammar: CallGrammar, rules: CallRules, *, trigger: str = ""
) -> GrammarSource:
    (first, *others) = rules.tools
    field = "tools" if others else f"{first.field}.function.parameters"
    source = GrammarSource(
        "grammar",
        "\n".join([*start, *grammar.rules]),
        trigger=trigger,
        trigger_token_id=rules.token_ids.get(trigger),
        field=field,
    )
    try:
        source.validate()
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{field}: {error.message}", field) from None
    return source
