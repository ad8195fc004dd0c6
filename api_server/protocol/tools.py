"""Request fields of a chat that define tools:

    tools                 [{"type": "function", "function": {name, description, …}}]
    tool_choice           "none", "auto", "required", {"type": "function", "function": {"name": …}},
                          {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}
    parallel_tool_calls   false: one call at most

An error names the path of the invalid field: `tools[3].function.parameters`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from api_server.protocol.fields import IgnoredFields, Strict, given_fields, ignored_of, is_encodable
from api_server.protocol.schemas import BOOLEAN, STRING, a_list, an_object, one_of
from proto.errors import InvalidRequestError, require, shown
from proto.messages.grammar import MAX_GRAMMAR_BYTES, check_schema, encoded

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 512 << 10
"""Of the parameters of all tools of a request."""
MAX_LISTED_TOOLS: Final = 1024
"""Most tools in a list of another API, with those that are left out."""
MAX_DESCRIPTION_CHARACTERS: Final = 1 << 16
TOOL_NAME: Final = r"^[A-Za-z0-9_-]{1,64}$"
_NAME: Final = re.compile(TOOL_NAME[1:-1])
ToolMode = Literal["none", "auto", "required"]
_MODES: Final[dict[str, ToolMode]] = {"none": "none", "auto": "auto", "required": "required"}


@dataclass(frozen=True)
class FunctionTool:
    """A function that the model may call.

    parameters: JSON schema of the arguments. strict: arguments conform to the schema even if the
    model may choose whether to call. field: path in the request, for errors.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    field: str = "tools"

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class NamedTool:
    """A tool_choice that forces a call of one function."""

    name: str


@dataclass(frozen=True)
class AllowedTools:
    """A tool_choice that offers some tools only. mode: "required" forces a call of one of them."""

    mode: Literal["auto", "required"]
    names: tuple[str, ...]


def read_tools(value: Any, ignored: IgnoredFields) -> list[FunctionTool]:
    """Return the tools of a request; raise InvalidRequestError that names the invalid field.

    ignored: collects fields that no API defines.
    """
    require(isinstance(value, list), "tools", "must be a list")
    require(len(value) <= MAX_TOOLS, "tools", f"takes at most {MAX_TOOLS}, got {len(value)}")
    tools: list[FunctionTool] = []
    left = MAX_TOOLS_BYTES
    for index, item in enumerate(value):
        if isinstance(item, FunctionTool):
            tool = item
        else:
            tool, size = _tool(item, f"tools[{index}]", ignored)
            left -= size
        require(
            left >= 0,
            f"{tool.field}.function.parameters",
            f"is beyond the {MAX_TOOLS_BYTES} bytes that those of all tools may have together",
        )
        is_new = all(tool.name != other.name for other in tools)
        require(is_new, f"{tool.field}.function.name", f"is there twice: {tool.name}")
        tools.append(tool)
    return tools


def _tool(value: Any, where: str, ignored: IgnoredFields) -> tuple[FunctionTool, int]:
    """Return a tool and the size of its parameters."""
    fields = _object(value, where, ("type", "function"), ignored)
    is_function = fields.get("type") == "function"
    require(is_function, f"{where}.type", "must be function: no other tools are available")
    require("function" in fields, f"{where}.function", "is missing")
    within = f"{where}.function"
    known = ("name", "description", "parameters", "strict")
    function = _object(fields["function"], within, known, ignored)
    name: Any = function.get("name")
    matches = isinstance(name, str) and _NAME.fullmatch(name) is not None
    require(matches, f"{within}.name", f"must match {TOOL_NAME}")
    strict = function.get("strict", False)
    require(isinstance(strict, bool), f"{within}.strict", "must be true or false")
    description = function.get("description")
    if description is not None:
        _check_text(description, f"{within}.description")
    parameters, size = _parameters(function.get("parameters", {}), f"{within}.parameters")
    return FunctionTool(name, description, parameters, strict, where), size


def _parameters(schema: Any, where: str) -> tuple[Mapping[str, Any], int]:
    """Return the JSON schema of the arguments and its size; {} means no arguments."""
    require(isinstance(schema, dict), where, "must be a JSON schema of an object")
    try:
        check_schema(schema)
        size = len(encoded(schema))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where} {error.message}", where) from None
    limit = MAX_GRAMMAR_BYTES
    require(size <= limit, where, f"has {size} bytes, at most {limit} are taken")
    require(schema.get("type", "object") == "object", f"{where}.type", "must be object")
    properties = schema.get("properties", {})
    require(isinstance(properties, dict), f"{where}.properties", "must be an object")
    return {"type": "object", "properties": {}, **schema}, size


def _check_text(value: Any, where: str) -> None:
    require(isinstance(value, str), where, "must be a string")
    limit = MAX_DESCRIPTION_CHARACTERS
    require(len(value) <= limit, where, f"is longer than {limit}")
    require(is_encodable(value), where, "holds half of a surrogate pair, which is no text")


def _object(
    value: Any, where: str, known: tuple[str, ...], ignored: IgnoredFields
) -> dict[str, Any]:
    require(isinstance(value, dict), where, "must be an object")
    return given_fields(value, known, {}, ignored, f"{where}.")


def _tools(value: Any, info: ValidationInfo) -> Any:
    return read_tools(value, ignored_of(info))


def _choice(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, NamedTool | AllowedTools):
        return value
    if isinstance(value, str):
        choices = "none, auto, required or a function by its name"
        require(value in _MODES, "tool_choice", f"must be {choices}")
        return value
    ignored = ignored_of(info)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value, ignored)
    return NamedTool(_named_function(value, "tool_choice", ignored))


def _named_function(value: Any, where: str, ignored: IgnoredFields) -> str:
    """Return the name in {"type": "function", "function": {"name": …}}."""
    choice = _object(value, where, ("type", "function"), ignored)
    require(choice.get("type") == "function", f"{where}.type", "must be function")
    function = _object(choice.get("function"), f"{where}.function", ("name",), ignored)
    name = function.get("name")
    require(isinstance(name, str), f"{where}.function.name", "must be a string")
    return str(name)


def _allowed_tools(value: Any, ignored: IgnoredFields) -> AllowedTools:
    where = "tool_choice.allowed_tools"
    choice = _object(value, "tool_choice", ("type", "allowed_tools"), ignored)
    allowed = _object(choice.get("allowed_tools"), where, ("mode", "tools"), ignored)
    mode: Any = allowed.get("mode")
    tools: Any = allowed.get("tools")
    require(mode in ("auto", "required"), f"{where}.mode", "must be auto or required")
    is_list = isinstance(tools, list) and 0 < len(tools) <= MAX_TOOLS
    require(is_list, f"{where}.tools", f"must be a list of 1 to {MAX_TOOLS} tools")
    names = [
        _named_function(tool, f"{where}.tools[{index}]", ignored)
        for index, tool in enumerate(tools)
    ]
    return AllowedTools(mode, tuple(names))


_FUNCTION_TYPE: Final = {"const": "function"}
_TOOLS_SCHEMA: Final = a_list(
    an_object(
        type=_FUNCTION_TYPE,
        function=an_object(
            name=STRING | {"pattern": TOOL_NAME},
            optional={
                "description": STRING,
                "parameters": {"type": "object"},
                "strict": BOOLEAN,
            },
        ),
    ),
    maxItems=MAX_TOOLS,
)
_FUNCTION_CHOICE_SCHEMA: Final = an_object(type=_FUNCTION_TYPE, function=an_object(name=STRING))
_CHOICE_SCHEMA: Final = {
    "anyOf": [
        one_of(*_MODES),
        _FUNCTION_CHOICE_SCHEMA,
        an_object(
            type={"const": "allowed_tools"},
            allowed_tools=an_object(
                mode={"enum": ["auto", "required"]},
                tools=a_list(_FUNCTION_CHOICE_SCHEMA, minItems=1, maxItems=MAX_TOOLS),
            ),
        ),
    ]
}


class ToolFields(Strict):
    """Request fields about tools."""

    tools: Annotated[
        list[FunctionTool],
        Field(fail_fast=True, max_length=MAX_TOOLS),
        BeforeValidator(_tools),
        WithJsonSchema(_TOOLS_SCHEMA),
    ] = []
    """Functions that the model may call, up to 128."""
    tool_choice: Annotated[
        str | NamedTool | AllowedTools | None,
        BeforeValidator(_choice),
        WithJsonSchema(_CHOICE_SCHEMA),
    ] = None
    """none, auto (with tools the default), required (at least one call), a function by name, or
    allowed_tools with a mode (auto or required) and those of the tools that are offered."""
    parallel_tool_calls: bool = True
    """false: at most one call in an answer."""

    @property
    def callable_tools(self) -> list[FunctionTool]:
        """The tools that the answer may call.

        Raises InvalidRequestError if tool_choice names no tool of the request.
        """
        choice = self.tool_choice
        if choice is not None and choice != "none" and not self.tools:
            raise InvalidRequestError("tool_choice needs tools", "tool_choice")
        if isinstance(choice, NamedTool | AllowedTools):
            names = choice.names if isinstance(choice, AllowedTools) else (choice.name,)
            known = {tool.name for tool in self.tools}
            for name in names:
                if name not in known:
                    raise InvalidRequestError(
                        f"tool_choice names no tool of this request: {shown(name)}", "tool_choice"
                    )
            return [tool for tool in self.tools if tool.name in names]
        return [] if choice == "none" else self.tools

    @property
    def listed_tools(self) -> list[FunctionTool]:
        """The tools in the prompt: those that may be called; beside a function by name, all."""
        return self.tools if isinstance(self.tool_choice, NamedTool) else self.callable_tools

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        mode = choice.mode if isinstance(choice, AllowedTools) else choice
        return isinstance(choice, NamedTool) or mode == "required"

    @property
    def calls_once(self) -> bool:
        """The answer may contain only one call; a function by name is called once."""
        return isinstance(self.tool_choice, NamedTool) or not self.parallel_tool_calls
