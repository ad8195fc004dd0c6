"""The tools of a request to /v1/messages, as functions of a chat.

{name, description, input_schema}      {"type": "function", "function": {name, description, …}}
tool_choice auto, any, tool, none      auto, required, a function by its name, none
disable_parallel_tool_use              parallel_tool_calls
"""

from collections.abc import Sequence
from typing import Any, Final

from api_server.protocol.fields import IgnoredFields, given_fields
from proto.errors import InvalidRequestError, shown

Json = dict[str, Any]

_FUNCTION_FIELDS: Final = ("name", "description", "input_schema", "strict")
_IGNORED_FIELDS: Final = frozenset(
    {"type", "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers"}
)
"""Fields that tell Anthropic's servers how to cache, stream or find a tool."""
_MODES: Final = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE_FIELDS: Final = ("type", "name", "disable_parallel_tool_use")


class MessageTools:
    """The tools of a request, translated into functions of a chat.

    tools, choice: as in the request. ignored: collects the tools of Anthropic's servers, which are
    left out. Raises InvalidRequestError.

    paths: in the request, of each function.
    """

    def __init__(self, tools: Sequence[Json], choice: Json | None, ignored: IgnoredFields) -> None:
        self._functions: list[Json] = []
        self.paths: list[str] = []
        for index, tool in enumerate(tools):
            kind = tool.get("type")
            if kind not in (None, "custom"):
                ignored.add(f"tools.{kind}")
                continue
            self._functions.append(_function(tool, f"tools[{index}]", ignored))
            self.paths.append(f"tools[{index}]")
        self._choice, self._parallel = self._chat_tool_choice(choice or {"type": "auto"}, ignored)

    def chat_fields(self) -> Json:
        """Return the fields of the chat completion; {} without tools."""
        if not self._functions:
            return {}
        return {
            "tools": self._functions,
            "tool_choice": self._choice,
            "parallel_tool_calls": self._parallel,
        }

    def _chat_tool_choice(self, choice: Json, ignored: IgnoredFields) -> tuple[Any, bool]:
        """Return (tool_choice, parallel_tool_calls) of the chat completion."""
        kind = choice.get("type")
        given = given_fields(choice, _CHOICE_FIELDS, {}, ignored, "tool_choice.")
        once = given.get("disable_parallel_tool_use", False)
        if not isinstance(once, bool):
            raise InvalidRequestError(
                "tool_choice.disable_parallel_tool_use must be true or false", "tool_choice"
            )
        if kind in ("any", "tool") and not self._functions:
            raise InvalidRequestError(f"tool_choice {kind} needs tools", "tool_choice")
        if kind == "tool":
            name = given.get("name")
            if name not in [function["function"]["name"] for function in self._functions]:
                raise InvalidRequestError(
                    f"tool_choice: there is no tool {shown(name)} in tools", "tool_choice"
                )
            return {"type": "function", "function": {"name": name}}, not once
        if not isinstance(kind, str) or kind not in _MODES:
            raise InvalidRequestError(
                "tool_choice.type must be 'auto', 'any', 'tool' or 'none'", "tool_choice"
            )
        return _MODES[kind], not once


def _function(tool: Json, where: str, ignored: IgnoredFields) -> Json:
    rest = {name: value for name, value in tool.items() if name not in _IGNORED_FIELDS}
    given = given_fields(rest, _FUNCTION_FIELDS, {}, ignored, "tools.")
    if not isinstance(given.get("name"), str):
        raise InvalidRequestError(f"{where}.name must be a string", f"{where}.name")
    if not isinstance(given.get("input_schema"), dict):
        raise InvalidRequestError(
            f"{where}.input_schema must be a JSON schema of an object", f"{where}.input_schema"
        )
    given["parameters"] = given.pop("input_schema")
    return {"type": "function", "function": given}
