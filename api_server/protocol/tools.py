"""The fields of a chat request that speak of tools.

    tools                 [{"type": "function", "function": {name, description, …}}]
    tool_choice           "none", "auto", "required", {"type": "function", "function": {"name": …}}
    parallel_tool_calls   false: one call at most

Owns their types and limits. An error names the place: `tools[3].function.parameters`. How a model
writes its calls is in parsers/tools/.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ValidationInfo, WithJsonSchema

from api_server.protocol.fields import IgnoredFields, given_fields, ignored_of
from proto.errors import InvalidRequestError, shown
from proto.grammar import MAX_GRAMMAR_BYTES, check_schema, encoded

MAX_TOOLS: Final = 128
MAX_DESCRIPTION_CHARACTERS: Final = 1 << 16
TOOL_NAME: Final = r"^[A-Za-z0-9_-]{1,64}$"
_NAME: Final = re.compile(TOOL_NAME[1:-1])
ToolMode = Literal["none", "auto", "required"]
_MODES: Final[dict[str, ToolMode]] = {"none": "none", "auto": "auto", "required": "required"}


@dataclass(frozen=True)
class FunctionTool:
    """A function that the model may call.

    parameters: a JSON schema of an object. strict: what it is called with keeps to that also where
    the model chooses whether to call. field: its place in the request, for errors.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    field: str = "tools"

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class NamedTool:
    """The choice of one function, which must be called."""

    name: str


def read_tools(value: Any, ignored: IgnoredFields) -> list[FunctionTool]:
    """The tools of a request; raises InvalidRequestError with the place of what is wrong.

    ignored: collects fields that no API defines.
    """
    if not isinstance(value, list):
        raise InvalidRequestError("tools must be a list", "tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError(f"tools takes at most {MAX_TOOLS}, got {len(value)}", "tools")
    tools: list[FunctionTool] = []
    for place, each in enumerate(value):
        tool = each if isinstance(each, FunctionTool) else _tool(each, f"tools[{place}]", ignored)
        if any(tool.name == other.name for other in tools):
            raise _wrong(f"{tool.field}.function.name", f"is there twice: {tool.name}")
        tools.append(tool)
    return tools


def _tool(value: Any, where: str, ignored: IgnoredFields) -> FunctionTool:
    fields = _object(value, where, ("type", "function"), ignored)
    if fields.get("type") != "function":
        raise _wrong(f"{where}.type", "must be function: no other tools are available")
    if "function" not in fields:
        raise _wrong(f"{where}.function", "is missing")
    within = f"{where}.function"
    known = ("name", "description", "parameters", "strict")
    function = _object(fields["function"], within, known, ignored)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{within}.name", f"must match {TOOL_NAME}")
    strict = function.get("strict", False)
    if not isinstance(strict, bool):
        raise _wrong(f"{within}.strict", "must be true or false")
    description = function.get("description")
    if description is not None:
        _check_text(description, f"{within}.description")
    parameters = _parameters(function.get("parameters", {}), f"{within}.parameters")
    return FunctionTool(name, description, parameters, strict, where)


def _parameters(schema: Any, where: str) -> Mapping[str, Any]:
    """A schema of an object; {} is one without properties."""
    if not isinstance(schema, dict):
        raise _wrong(where, "must be a JSON schema of an object")
    try:
        check_schema(schema)
        size = len(encoded(schema))
    except InvalidRequestError as error:
        raise _wrong(where, error.message) from None
    if size > MAX_GRAMMAR_BYTES:
        raise _wrong(where, f"has {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken")
    if schema.get("type", "object") != "object":
        raise _wrong(f"{where}.type", "must be object")
    if not isinstance(schema.get("properties", {}), dict):
        raise _wrong(f"{where}.properties", "must be an object")
    return {"type": "object", "properties": {}, **schema}


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong(where, "must be a string")
    if len(value) > MAX_DESCRIPTION_CHARACTERS:
        raise _wrong(where, f"is longer than {MAX_DESCRIPTION_CHARACTERS}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(where, "holds half of a surrogate pair, which is no text") from None


def _object(
    value: Any, where: str, known: tuple[str, ...], ignored: IgnoredFields
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "must be an object")
    try:
        return given_fields(value, known, {}, ignored, f"{where}.")
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, error.param) from None


def _wrong(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}", where)


def _tools(value: Any, info: ValidationInfo) -> Any:
    return read_tools(value, ignored_of(info))


def _choice(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, NamedTool):
        return value
    if isinstance(value, str):
        if value not in _MODES:
            raise _wrong("tool_choice", "must be none, auto, required or a function by its name")
        return value
    ignored = ignored_of(info)
    choice = _object(value, "tool_choice", ("type", "function"), ignored)
    if choice.get("type") != "function":
        raise _wrong("tool_choice.type", "must be function")
    function = _object(choice.get("function"), "tool_choice.function", ("name",), ignored)
    name = function.get("name")
    if not isinstance(name, str):
        raise _wrong("tool_choice.function.name", "must be a string")
    return NamedTool(name)


_TOOLS_SCHEMA: Final = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": TOOL_NAME},
                    "description": {"type": "string"},
                    "parameters": {"type": "object"},
                    "strict": {"type": "boolean"},
                },
                "required": ["name"],
            },
        },
        "required": ["type", "function"],
    },
}
_CHOICE_SCHEMA: Final = {
    "anyOf": [
        {"type": "string", "enum": list(_MODES)},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}


class ToolFields(BaseModel):
    """The fields of a request that say it."""

    tools: Annotated[
        list[FunctionTool], BeforeValidator(_tools), WithJsonSchema(_TOOLS_SCHEMA)
    ] = []
    """Functions that the model may call, up to 128."""
    tool_choice: Annotated[
        str | NamedTool | None, BeforeValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)
    ] = None
    """none, auto (with tools the default), required (at least one call), or a function by name."""
    parallel_tool_calls: bool = True
    """false: at most one call in an answer."""

    @property
    def callable_tools(self) -> list[FunctionTool]:
        """Those that the answer may call; raises InvalidRequestError for a choice of none."""
        choice = self.tool_choice
        if choice is not None and choice != "none" and not self.tools:
            raise InvalidRequestError("tool_choice needs tools", "tool_choice")
        if isinstance(choice, NamedTool):
            found = [tool for tool in self.tools if tool.name == choice.name]
            if not found:
                raise InvalidRequestError(
                    f"tool_choice names no tool of this request: {shown(choice.name)}",
                    "tool_choice",
                )
            return found
        return [] if choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call in any case."""
        return isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required"

    @property
    def calls_once(self) -> bool:
        """Whether the answer holds one call at most; a function by name is called once."""
        return isinstance(self.tool_choice, NamedTool) or not self.parallel_tool_calls
