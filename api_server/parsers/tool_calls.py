"""Tools of a chat request: how the prompt shows them, and how the answer may call them.

    tool_choice            grammar of the answer
    auto                   none
    auto, and a strict     after the marker of a call; a format without markers is constrained from
    tool or at most        the start, with any other text as an alternative
    one call
    required, or a name    from the start: calls only
    none                   the grammar of the request, as without tools

`ModelToolCalls.plan` implements this table. The formats of calls are in `tools/`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from api_server.parsers.output import PLAIN_TEXT, OutputParser
from api_server.parsers.reasoning import CallsInReasoning
from api_server.parsers.tools.base import (
    INDEX,
    MAX_CALLS_IN_GRAMMAR,
    NAME,
    CallRules,
    ToolCallFormat,
    ToolSchemas,
)
from api_server.parsers.tools.registry import DEFAULT_FORMAT, tool_call_format
from api_server.protocol.fields import IgnoredFields, errors_of
from api_server.protocol.json_schema import SchemaWork, json_rule, rewrite_schema
from api_server.protocol.tools import FunctionTool, ToolFields
from api_server.text.chat_template import Conversation, TemplateFacts, arguments_text
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError
from proto.messages.grammar import GrammarSource, check_schema, decoded

Message = dict[str, Any]
_OF_AN_EMPTY_LIST: Final = frozenset(
    ("type", "properties", "required", "title", "description", "$schema")
)
NO_PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""Schema of a tool without parameters."""


@dataclass(frozen=True, slots=True)
class ToolCallPlan:
    """How the answer to one request may call tools.

    format: None for an answer that calls none. tools: all tools of the request. grammar: of the
    answer; None for any text. markers: token id → text of the special tokens that the parser must
    see.
    """

    format: ToolCallFormat | None = None
    tools: ToolSchemas = field(default_factory=dict)
    grammar: GrammarSource | None = None
    markers: Mapping[int, str] = field(default_factory=dict)

    def new_parser(self) -> OutputParser:
        return PLAIN_TEXT if self.format is None else self.format.new_parser(self.tools)

    @property
    def in_reasoning(self) -> CallsInReasoning | None:
        """How a call within reasoning is recognised; None for an answer that calls no tools."""
        if self.format is None:
            return None
        special, markers = {*self.markers.values()}, self.format.call_markers
        return CallsInReasoning(
            tokens=[marker for marker in markers if marker in special],
            texts=[marker for marker in markers if marker not in special],
            tool_names=self.tools,
            new_parser=self.new_parser,
        )


TEXT_ONLY: Final = ToolCallPlan()


@dataclass(frozen=True, slots=True)
class ModelToolCalls:
    """How the served model calls tools.

    parser_name: value of --tool-call-parser. template: source of the chat template.
    """

    parser_name: str
    template: str | None
    facts: TemplateFacts
    tokenizer: ModelTokenizer

    @property
    def template_has_tools(self) -> bool:
        """The chat template renders tools."""
        return "tools" in self.facts.names

    @property
    def format(self) -> ToolCallFormat | None:
        """The format in which the model writes calls; None if it is unknown."""
        return tool_call_format(
            self.parser_name, self.template, template_has_tools=self.template_has_tools
        )

    def template_tools(self, request: ToolFields) -> list[dict[str, Any]] | None:
        """Return the request's tools for the chat template; None if no tool may be called."""
        if not request.callable_tools:
            return None
        return [tool.for_template() for tool in request.listed_tools]

    def adapt_conversation(self, conversation: Conversation) -> Conversation:
        """Return the conversation as the chat template takes it.

        A template that renders calls but no tools gets a description of the tools, and one that
        renders neither gets all of them as text.
        """
        call_format = self.format or DEFAULT_FORMAT
        messages = conversation.messages
        if not self.template_has_tools and not self.facts.renders_calls:
            return self._with_parts(with_tools_as_text(conversation, call_format))
        if call_format.call_id:
            messages = with_numbered_calls(messages, call_format.call_id)
        if self.facts.joins_arguments:
            messages = with_arguments_as_text(messages)
        if conversation.tools and not self.template_has_tools:
            messages = _with_tool_descriptions(messages, conversation.tools, call_format)
            return self._with_parts(replace(conversation, messages=messages, tools=None))
        return replace(conversation, messages=messages)

    def _with_parts(self, conversation: Conversation) -> Conversation:
        """Make parts of texts that were written here, for a template that knows nothing else."""
        if not self.facts.needs_parts:
            return conversation
        messages = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in conversation.messages
        ]
        return replace(conversation, messages=messages)

    def plan(
        self,
        request: ToolFields,
        text_grammar: GrammarSource | None,
        ignored: IgnoredFields,
        work: SchemaWork,
    ) -> ToolCallPlan:
        """Return how the answer may call the tools of a request.

        text_grammar: the grammar that the request demands of its text, if any. ignored: collects
        keywords of parameters that no grammar can enforce. work: of the request's schemas. Raises
        InvalidRequestError for tools that this model cannot call as requested.
        """
        tools = request.callable_tools
        if not tools:
            return ToolCallPlan(grammar=text_grammar)
        call_format = self.format
        if call_format is None:
            raise InvalidRequestError(
                "the format of this model's tool calls is unknown: its chat template matches none "
                "of the formats that --tool-call-parser accepts",
                "tools",
            )
        token_ids = {}
        for marker in call_format.markers:
            token_id = self.tokenizer.special_id(marker)
            if token_id is not None:
                token_ids[marker] = token_id
        has_grammar = (
            request.must_call
            or request.calls_once
            or text_grammar is not None
            or any(tool.strict for tool in tools)
        )
        all_schemas = has_grammar and call_format.needs_schemas
        offered = offered_tools(request, ignored, work, all_schemas=all_schemas)
        max_calls = 1 if request.calls_once else MAX_CALLS_IN_GRAMMAR
        rules = CallRules(offered, max_calls, token_ids, work)
        return ToolCallPlan(
            call_format,
            {tool.name: tool.parameters for tool in request.listed_tools},
            _answer_grammar(request, call_format, rules, text_grammar),
            {token_id: marker for marker, token_id in token_ids.items()},
        )


def offered_tools(
    request: ToolFields, ignored: IgnoredFields, work: SchemaWork, *, all_schemas: bool
) -> list[FunctionTool]:
    """Return the tools that the answer may call, as grammars take them.

    all_schemas: prepare the schema of every tool, not only of those that calls have to keep to.
    Raises InvalidRequestError.
    """
    offered = []
    for tool in request.callable_tools:
        strict = tool.strict or request.must_call
        is_held = strict or all_schemas
        schema = _parameters_schema(tool, ignored, work) if is_held else tool.parameters
        offered.append(replace(tool, parameters=schema, strict=strict))
    return offered


def _parameters_schema(
    tool: FunctionTool, ignored: IgnoredFields, work: SchemaWork
) -> Mapping[str, Any]:
    """Return the schema of a tool's parameters as grammars take it."""
    field = f"{tool.field}.function.parameters"
    with errors_of(field):
        check_schema(tool.parameters)
        if _names_nothing(tool.parameters):
            return NO_PARAMETERS
        schema, removed = rewrite_schema(tool.parameters, work)
    for keyword in removed:
        ignored.add(f"{field}.{keyword}")
    return {} if isinstance(schema, bool) else schema


def _names_nothing(schema: Mapping[str, Any]) -> bool:
    """Whether a tool has no parameters, as one without `parameters` or with empty `properties`."""
    return (
        schema.keys() <= _OF_AN_EMPTY_LIST
        and schema.get("type", "object") == "object"
        and not schema.get("properties")
        and not schema.get("required")
    )


def _answer_grammar(
    request: ToolFields,
    call_format: ToolCallFormat,
    rules: CallRules,
    text_grammar: GrammarSource | None,
) -> GrammarSource | None:
    if request.must_call:
        if text_grammar is not None and text_grammar.field != "response_format":
            # a format describes the text of the answer, which is empty here; the other grammars
            # describe the whole answer
            raise InvalidRequestError(
                f"{text_grammar.field} does not go with a tool_choice that asks for a call",
                text_grammar.field,
            )
        return _grammar_source(["start: calls", *call_format.grammar(rules)], rules)
    if text_grammar is not None:
        return _calls_or_schema(text_grammar, call_format, rules)
    if not request.calls_once and not any(tool.strict for tool in rules.tools):
        return None
    grammar, trigger = call_format.grammar(rules), call_format.trigger
    if not trigger:
        start = ["start: calls | FREE", f"FREE: {call_format.free_text}"]
        return _grammar_source([*start, *grammar], rules)
    return _grammar_source(["start: after_trigger", *grammar], rules, trigger=trigger)


def _calls_or_schema(
    text_grammar: GrammarSource, call_format: ToolCallFormat, rules: CallRules
) -> GrammarSource:
    """Return the grammar of an answer that is either calls or JSON of the requested schema."""
    if text_grammar.kind != "json_schema" or not call_format.trigger:
        raise InvalidRequestError(
            f"beside tools {text_grammar.field} takes a JSON schema, and a model that marks its "
            "calls; tool_choice none lets it be",
            text_grammar.field,
        )
    with errors_of(text_grammar.field):
        answer = json_rule("answer", decoded(text_grammar.source), rules.work)
    has_strict = any(tool.strict for tool in rules.tools)
    field = strict_field(rules.tools) if has_strict else text_grammar.field
    lines = ["start: calls | answer", answer, *call_format.grammar(rules)]
    return _grammar_source(lines, rules, field=field)


def _grammar_source(
    lines: Sequence[str], rules: CallRules, *, trigger: str = "", field: str = ""
) -> GrammarSource:
    """Return the source of lines of Lark.

    field: path of the field that errors name; by default that of the strict tools.
    """
    field = field or strict_field(rules.tools)
    source = GrammarSource(
        "grammar",
        "\n".join(lines),
        trigger=trigger,
        trigger_token_id=rules.token_ids.get(trigger),
        field=field,
    )
    with errors_of(field):
        source.validate()
    return source


def strict_field(tools: Sequence[FunctionTool]) -> str:
    """Return the path of the only schema that calls have to keep to, or of all tools."""
    strict = [tool.field for tool in tools if tool.strict]
    return f"{strict[0]}.function.parameters" if len(strict) == 1 else "tools"


# Calls as chat templates take them.


def with_numbered_calls(
    messages: Sequence[Mapping[str, Any]], call_id: str
) -> list[Mapping[str, Any]]:
    """Return the messages with ids of calls that a model was trained with: functions.find:0

    A result belongs to the last call before it that had its id.
    """
    ids: dict[str, str] = {}
    num_calls = 0
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        result_of = message.get("tool_call_id")
        if isinstance(result_of, str) and result_of in ids:
            message = {**message, "tool_call_id": ids[result_of]}
        calls = []
        for call in message.get("tool_calls") or []:
            name = call["function"]["name"]
            numbered = call_id.replace(NAME, name).replace(INDEX, str(num_calls))
            num_calls += 1
            if isinstance(call.get("id"), str):
                ids[call["id"]] = numbered
            calls.append({**call, "id": numbered})
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def with_arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the arguments of their calls as JSON."""
    return [
        {**message, "tool_calls": [_with_arguments_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_arguments_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_text(function["arguments"])}}


# Tools as text, for a chat template without tools.
#
#     system      You are helpful.            system      You are helpful.
#                                                         # Tools … one JSON object per line …
#     user        Is it cold?                 user        Is it cold?
#     assistant   calls weather          ─▶   assistant   <tool_call>{"name": "weather", …
#     tool        3 degrees                   user        <tool_response>3 degrees</tool_response>


def with_tools_as_text(conversation: Conversation, call_format: ToolCallFormat) -> Conversation:
    """Return the conversation with tools, calls and results of calls written as text."""
    messages: list[Message] = []
    previous_role = ""
    for message in conversation.messages:
        if message["role"] != "tool":
            messages.append(_with_calls_as_text(message, call_format))
        elif previous_role == "tool":  # results of parallel calls are one message
            messages[-1]["content"] += f"\n{_tool_response(message)}"
        else:
            messages.append({"role": "user", "content": _tool_response(message)})
        previous_role = message["role"]
    if conversation.tools:
        messages = _with_tool_descriptions(messages, conversation.tools, call_format)
    return replace(conversation, messages=messages, tools=None)


def _with_tool_descriptions(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    call_format: ToolCallFormat,
) -> list[Message]:
    """Return the messages with the tools in the system message, which is added if missing."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = call_format.render_calls([("function-name", '{"argument-name": "value"}')])
    description = (
        "# Tools\n\nYou may call one or more functions. Their signatures are within <tools> and "
        f"</tools>:\n<tools>\n{lines}\n</tools>\n\nTo call a function answer with:\n{example}"
    )
    if messages and messages[0]["role"] in ("system", "developer"):
        first, *rest = messages
        content = f"{_text(first['content'])}\n\n{description}"
        return [{**first, "content": content}, *map(dict, rest)]
    return [{"role": "system", "content": description}, *map(dict, messages)]


def _with_calls_as_text(message: Mapping[str, Any], call_format: ToolCallFormat) -> Message:
    """Return the message with its tool calls appended to its content."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [call["function"] for call in calls]
    rendered = call_format.render_calls(
        [(function["name"], arguments_text(function["arguments"])) for function in functions]
    )
    content = "\n".join(text for text in (_text(message["content"]), rendered) if text)
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": content}


def _tool_response(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{_text(message['content'])}\n</tool_response>"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
