"""The tools of a request to /v1/messages, and the same in the words of a chat.

    {name, description, input_schema}      {"type": "function", "function": {name, description, …}}
    tool_choice auto, any, tool, none      auto, required, a function by its name, none
    disable_parallel_tool_use              parallel_tool_calls

Owns that. Tools that Anthropic runs, or has given a schema of its own, have a type; the model knows
nothing of them, and they are left out and named.
"""

from collections.abc import Sequence
from typing import Any, Final

from api_server.protocol.fields import given_fields
from api_server.protocol.ignored import IgnoredFields
from proto.errors import InvalidRequestError, shown

Json = dict[str, Any]

_TAKEN: Final = ("name", "description", "input_schema", "strict")
_WITHOUT_EFFECT: Final = frozenset(
    {"type", "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers"}
)
"""How a tool is kept, streamed, or found by others than the model."""
_MODES: Final = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE: Final = ("type", "name", "disable_parallel_tool_use")


class MessageTools:
    """What the model may call.

    tools, choice: as in the request. ignored: is told of what is left out. Raises
    InvalidRequestError.
    """

    def __init__(self, tools: Sequence[Json], choice: Json | None, ignored: IgnoredFields) -> None:
        self._functions: list[Json] = []
        self.places: list[int] = []
        for place, tool in enumerate(tools):
            kind = tool.get("type")
            if kind not in (None, "custom"):
                ignored.add(f"tools.{kind}")
                continue
            self._functions.append(_function(tool, f"tools.{place}", ignored))
            self.places.append(place)
        self._choice, self._parallel = self._as_in_chat(choice or {"type": "auto"}, ignored)

    def chat_fields(self) -> Json:
        """The fields of a chat completion."""
        if not self._functions:
            return {}
        return {
            "tools": self._functions,
            "tool_choice": self._choice,
            "parallel_tool_calls": self._parallel,
        }

    def _as_in_chat(self, choice: Json, ignored: IgnoredFields) -> tuple[Any, bool]:
        kind = choice.get("type")
        given = given_fields(choice, _CHOICE, {}, ignored, "tool_choice.")
        once = given.get("disable_parallel_tool_use", False)
        if not isinstance(once, bool):
            raise InvalidRequestError(
                "tool_choice.disable_parallel_tool_use must be true or false", "tool_choice"
            )
        if kind in ("any", "tool") and not self._functions:
            raise InvalidRequestError(f"tool_choice {kind} needs tools", "tool_choice")
        if kind == "tool":
            name = given.get("name")
            if name not in [each["function"]["name"] for each in self._functions]:
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
    rest = {name: value for name, value in tool.items() if name not in _WITHOUT_EFFECT}
    given = given_fields(rest, _TAKEN, {}, ignored, "tools.")
    if not isinstance(given.get("name"), str):
        raise InvalidRequestError(f"{where}.name must be a string", f"{where}.name")
    if not isinstance(given.get("input_schema"), dict):
        raise InvalidRequestError(
            f"{where}.input_schema must be a JSON schema of an object", f"{where}.input_schema"
        )
    given["parameters"] = given.pop("input_schema")
    return {"type": "function", "function": given}
