"""The ways in which models write calls: for each a parser, and a grammar of what it reads.

    hermes       <tool_call>\n{"name": "find", "arguments": {…}}\n</tool_call>     Hermes, Qwen
    llama3_json  {"name": "find", "parameters": {…}}; {…}                            Llama 3
    mistral      [TOOL_CALLS] [{"name": "find", "arguments": {…}}, …]                Mistral, Nemo
                 [TOOL_CALLS]find[ARGS]{…}                                           later ones
    pythonic     [find(text="a"), …]                                                 Llama 4, 3.2

A grammar keeps to what the parser reads as calls and nothing else, arguments within their schemas.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from api_server.parsers.parts import PartsParser
from api_server.parsers.tools.common import NewId
from api_server.parsers.tools.json_parser import ARGUMENTS_MARK, ID_MARK, JsonCallsParser, JsonMarks
from api_server.parsers.tools.pythonic import CLOSING, OPENING, PythonicParser
from api_server.parsers.tools.schemas import ANY_OBJECT, json_rule, property_rules, slim
from proto.config import ToolCallParser
from proto.errors import InvalidRequestError

MOST_CALLS: Final = 16
"""That a grammar lets an answer hold: a small model may never end by itself."""
_BLANKS: Final = r"/[ \n]?/"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """schema: of its arguments. strict: they keep to it. field: where it came from, for errors."""

    name: str
    schema: Mapping[str, Any]
    strict: bool
    field: str

    @property
    def json_rule(self) -> str:
        """Its arguments as JSON, in a grammar."""
        return json_rule(slim(self.schema) if self.strict else ANY_OBJECT)


@dataclass(frozen=True, slots=True)
class CallRules:
    """What calls have to be. most: calls. token_ids: of the marks that are special tokens."""

    tools: Sequence[OfferedTool]
    most: int
    token_ids: Mapping[str, int]

    def mark(self, text: str) -> str:
        """As a grammar has it."""
        token_id = self.token_ids.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def listed(self, first: str, further: str) -> str:
        """The first call and as many more as there may be."""
        return first if self.most == 1 else f"{first} ({further}){{0,{self.most - 1}}}"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """In the words of Lark.

    rules: beside `calls`, which is the whole of an answer that calls.
    behind: the rule for what comes behind `trigger` in an answer that may call; where it is empty,
    `free` is what an answer that does not call is.
    """

    rules: Sequence[str]
    trigger: str = ""
    behind: str = ""
    free: str = ""


class ToolFormat(Protocol):
    """marks: texts that may be special tokens and have to reach the parser."""

    @property
    def marks(self) -> Sequence[str]: ...

    def parser(self, names: Collection[str], new_id: NewId) -> PartsParser:
        """For the text of one choice. names: of the tools that there are."""
        ...

    def grammar(self, rules: CallRules) -> CallGrammar:
        """Raises InvalidRequestError for a schema that this format cannot be held to."""
        ...

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """(name, arguments as JSON) of each, as a model writes them together."""
        ...


class Hermes:
    marks = ("<tool_call>", "</tool_call>")

    def parser(self, names: Collection[str], new_id: NewId) -> PartsParser:
        return JsonCallsParser(JsonMarks(*self.marks), names, new_id)

    def grammar(self, rules: CallRules) -> CallGrammar:
        opening, closing = map(rules.mark, self.marks)
        return CallGrammar(
            [
                f"calls: {opening} behind",
                f"behind: {rules.listed('rest', f'BLANK {opening} rest')}",
                f"rest: BLANK object BLANK {closing}",
                f"BLANK: {_BLANKS}",
                *object_rules(rules, "arguments"),
            ],
            trigger=self.marks[0],
            behind="behind",
        )

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        opening, closing = self.marks
        return "\n".join(
            f"{opening}\n{_beginning(name, 'arguments')}{arguments}}}\n{closing}"
            for name, arguments in calls
        )


class Llama3:
    marks = ("<|python_tag|>",)

    def parser(self, names: Collection[str], new_id: NewId) -> PartsParser:
        marks = JsonMarks(self.marks[0], separator=";", bare=True)
        return JsonCallsParser(marks, names, new_id)

    def grammar(self, rules: CallRules) -> CallGrammar:
        further = '"; " object'
        return CallGrammar(
            [
                f"calls: {rules.mark(self.marks[0])}? {rules.listed('object', further)}",
                *object_rules(rules, "parameters"),
            ],
            free=r"/([ \n]*([^ \n\r\t{<]|<[^|])([^<]|<[^|])*)?/",
        )

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(f"{_beginning(name, 'parameters')}{each}}}" for name, each in calls)


class Mistral:
    """named: calls have their name before their arguments, and no list."""

    def __init__(self, *, named: bool) -> None:
        self._named = named

    marks = ("[TOOL_CALLS]", ARGUMENTS_MARK, ID_MARK)

    def parser(self, names: Collection[str], new_id: NewId) -> PartsParser:
        return JsonCallsParser(JsonMarks(self.marks[0], named=True), names, new_id)

    def grammar(self, rules: CallRules) -> CallGrammar:
        opening, arguments = rules.mark(self.marks[0]), rules.mark(ARGUMENTS_MARK)
        if self._named:
            names = [
                f"{quoted(tool.name)} {arguments} arguments_{place}"
                for place, tool in enumerate(rules.tools)
            ]
            body = [
                f"behind: {rules.listed('object', f'{opening} object')}",
                f"object: {' | '.join(names)}",
                *_argument_rules(rules),
            ]
        else:
            further = '", " object'
            body = [
                f'behind: BLANK "[" {rules.listed("object", further)} "]"',
                f"BLANK: {_BLANKS}",
                *object_rules(rules, "arguments"),
            ]
        return CallGrammar(
            [f"calls: {opening} behind", *body], trigger=self.marks[0], behind="behind"
        )

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        opening = self.marks[0]
        if self._named:
            return "".join(f"{opening}{name}{ARGUMENTS_MARK}{each}" for name, each in calls)
        objects = [f"{_beginning(name, 'arguments')}{each}}}" for name, each in calls]
        return f"{opening} [{', '.join(objects)}]"


class Pythonic:
    marks = (OPENING, CLOSING)

    def parser(self, names: Collection[str], new_id: NewId) -> PartsParser:
        return PythonicParser(names, new_id)

    def grammar(self, rules: CallRules) -> CallGrammar:
        calls, body = [], []
        for place, tool in enumerate(rules.tools):
            calls.append(f"{quoted(tool.name + '(')} arguments_{place} {quoted(')')}")
            body += _keyword_rules(f"arguments_{place}", tool)
        further = '", " call'
        return CallGrammar(
            [
                f'calls: "[" {rules.listed("call", further)} "]"',
                f"call: {' | '.join(calls)}",
                *body,
            ],
            free=r"/([ \n]*([^ \n\r\t\[<]|<[^|])[\s\S]*)?/",
        )

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        each = [f"{name}({_keywords(arguments)})" for name, arguments in calls]
        return f"[{', '.join(each)}]"


def object_rules(rules: CallRules, key: str) -> list[str]:
    """`object`: a call as one. key: of the arguments."""
    objects = [
        f"{quoted(_beginning(tool.name, key))} arguments_{place} {quoted('}')}"
        for place, tool in enumerate(rules.tools)
    ]
    return [f"object: {' | '.join(objects)}", *_argument_rules(rules)]


def _argument_rules(rules: CallRules) -> list[str]:
    return [f"arguments_{place}: {tool.json_rule}" for place, tool in enumerate(rules.tools)]


def _beginning(name: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": '


def _keyword_rules(rule: str, tool: OfferedTool) -> list[str]:
    """`a=1, b=2` in the order of the schema, without those that need not be there:

    first: nothing came before; then: something did, so a comma stands between. A call without
    all of its schema would say nothing, so it keeps to that also where it need not.
    """
    rules = []
    try:
        properties = property_rules(slim(tool.schema))
    except InvalidRequestError as error:
        where = f"{tool.field}.function.parameters"
        raise InvalidRequestError(f"{where}: {error.message}", where) from None
    for place, (name, required, each) in enumerate(properties):
        value = f"{rule}_value_{place}"
        pair = f"{quoted(name + '=')} {value}"
        then, first = f"{rule}_then_{place + 1}", f"{rule}_first_{place + 1}"
        skipped_first = "" if required else f" | {first}"
        skipped_then = "" if required else f" | {then}"
        rules += [
            f"{rule}_first_{place}: {pair} {then}{skipped_first}",
            f'{rule}_then_{place}: ", " {pair} {then}{skipped_then}',
            f"{value}: {_value(each)}",
        ]
    end = len(properties)
    rules += [f"{rule}: {rule}_first_0", f'{rule}_first_{end}: ""', f'{rule}_then_{end}: ""']
    return rules


def _keywords(arguments: str) -> str:
    pairs = json.loads(arguments).items()
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in pairs)


def _value(schema: Mapping[str, Any]) -> str:
    if schema.get("type") == "boolean" and not {"enum", "const"} & schema.keys():
        return '"True" | "False"'
    return json_rule(schema)


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


# The formats of calls by name, and which one a chat template speaks of.


FORMATS: Final[Mapping[ToolCallParser, ToolFormat]] = {
    "hermes": Hermes(),
    "llama3_json": Llama3(),
    "mistral": Mistral(named=False),
    "mistral_named": Mistral(named=True),
    "pythonic": Pythonic(),
}
DEFAULT: Final[ToolCallParser] = "hermes"
"""For templates without tools: the text that describes the tools asks for this format."""

_SIGNS: Final[Sequence[tuple[ToolCallParser, Sequence[str]]]] = (
    ("mistral_named", ("[TOOL_CALLS]", ARGUMENTS_MARK)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('"parameters": ',)),
    ("llama3_json", ("<|python_tag|>",)),
)
"""What a template says of calls; the first that fits."""
_OTHERS: Final = (
    "<function=",
    "<arg_key>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
)
"""Signs of formats that there is no parser for."""


def format_of(
    wanted: ToolCallParser, template: str | None, *, knows_tools: bool
) -> ToolFormat | None:
    """How calls are written; None where that is not known.

    wanted: by the operator, "auto" for what the template says. knows_tools: the template reads
    the tools.
    """
    if wanted != "auto":
        return FORMATS[wanted]
    if template is None or not knows_tools:
        return FORMATS[DEFAULT]
    if any(sign in template for sign in _OTHERS):
        return None
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None
