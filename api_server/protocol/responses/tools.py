"""The tools of a request to /v1/responses, as functions of a chat.

    function              weather               weather(city)
    custom                apply_patch           apply_patch(input: string)
    namespace files       read, write           files__read(…), files__write(…)
    web_search, …                               left out

Tools that OpenAI's servers run are left out: the model answers without them, as it may with any
tool. A request that forces a call of one is refused (400).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeGuard

from api_server.protocol.fields import IgnoredFields, given_fields
from api_server.protocol.tools import MAX_LISTED_TOOLS, MAX_TOOLS
from proto.errors import InvalidRequestError, shown

CUSTOM_INPUT: Final = "input"
"""The only argument of the function that represents a custom tool."""
NAMESPACE_SEPARATOR: Final = "__"
"""Joins a namespace and a name into the name that the model sees."""
MAX_NAME_CHARACTERS: Final = 64
"""A longer name of a tool in a namespace is cut and ends with a digest of the whole name."""
_DIGEST_BYTES: Final = 4
_TOOL_LIST: Final = f"a list of at most {MAX_LISTED_TOOLS} tools"
_NEUTRAL_FIELDS: Final = {"allowed_callers": (), "async": (False,), "defer_loading": (False,)}
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")
_CUSTOM_FIELDS: Final = ("name", "description", "format")
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client knows it. namespace: "" for none. custom: its input is plain text."""

    name: str
    namespace: str = ""
    is_custom: bool = False


class ResponseTools:
    """The tools of a request, translated into functions of a chat and back.

    tools, choice: as in the request. ignored: collects the tools that are left out. Raises
    InvalidRequestError.
    """

    def __init__(
        self, tools: Sequence[dict[str, Any]], choice: Any, ignored: IgnoredFields
    ) -> None:
        self._ignored = ignored
        self._tools: dict[str, ClientTool] = {}
        self._functions: dict[str, dict[str, Any]] = {}
        self._paths: dict[str, str] = {}
        for index, tool in enumerate(tools):
            self._add_tool(tool, "", f"tools[{index}]")
        self._choice = self._chat_tool_choice(choice)

    def function_name(self, name: str, namespace: str | None) -> str:
        """Return the function name of a tool, which need not be among the tools of this request."""
        if not namespace:
            return name
        joined = f"{namespace.removesuffix(NAMESPACE_SEPARATOR)}{NAMESPACE_SEPARATOR}{name}"
        if len(joined) <= MAX_NAME_CHARACTERS:
            return joined
        digest = blake2b(joined.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return f"{joined[: MAX_NAME_CHARACTERS - len(digest) - 1]}_{digest}"

    def client_tool(self, name: str) -> ClientTool:
        """Return the tool of a function name that the model wrote."""
        return self._tools.get(name, ClientTool(name))

    def chat_fields(self, parallel: bool) -> dict[str, Any]:
        """Return the fields of the chat completion. parallel: allow several calls in an answer."""
        if not self._functions:
            return {}
        return {
            "tools": list(self._functions.values()),
            "tool_choice": self._choice,
            "parallel_tool_calls": parallel,
        }

    @property
    def paths(self) -> list[str]:
        """Path in the request of each function of `chat_fields`."""
        return [self._paths[name] for name in self._functions]

    def _add_tool(self, tool: dict[str, Any], namespace: str, where: str) -> None:
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise InvalidRequestError(f"{where}.type must be a string", "tools")
        if kind == "namespace" and not namespace:
            members = tool.get("tools")
            if not _is_tool_list(members):
                raise InvalidRequestError(f"{where}.tools must be {_TOOL_LIST}", "tools")
            for index, member in enumerate(members):
                self._add_tool(member, _name(tool, where), f"{where}.tools[{index}]")
        elif kind in ("function", "custom"):
            self._add_function(tool, kind, namespace, where)
        else:
            self._ignored.add(f"tools.{kind}")

    def _add_function(self, tool: dict[str, Any], kind: str, namespace: str, where: str) -> None:
        name = _name(tool, where)
        function_name = self.function_name(name, namespace)
        if function_name in self._functions:
            raise InvalidRequestError(f"{where}: there is another tool of that name", "tools")
        if len(self._functions) == MAX_TOOLS:
            raise InvalidRequestError(f"there are at most {MAX_TOOLS} tools", "tools")
        known = _FUNCTION_FIELDS if kind == "function" else _CUSTOM_FIELDS
        rest = {key: value for key, value in tool.items() if key != "type"}
        given = given_fields(rest, known, _NEUTRAL_FIELDS, self._ignored, "tools.")
        if kind == "custom":
            if given.pop("format", {"type": "text"}) != {"type": "text"}:
                self._ignored.add("tools.format")
            given["parameters"] = _CUSTOM_PARAMETERS
        self._paths[function_name] = where
        self._tools[function_name] = ClientTool(name, namespace, kind == "custom")
        function = given | {"name": function_name}
        self._functions[function_name] = {"type": "function", "function": function}

    def _chat_tool_choice(self, choice: Any) -> Any:
        """Return the `tool_choice` of the chat. Removes tools that the choice does not allow."""
        if isinstance(choice, str):
            if choice not in ("auto", "none", "required"):
                raise InvalidRequestError(
                    "tool_choice must be 'auto', 'none', 'required' or an object", "tool_choice"
                )
            if choice == "required" and not self._functions:
                raise InvalidRequestError("tool_choice required needs tools", "tool_choice")
            return choice
        kind = choice.get("type")
        if kind in ("function", "custom"):
            return {"type": "function", "function": {"name": self._chosen_function(choice)}}
        if kind == "allowed_tools":
            return self._allow_tools(choice)
        raise InvalidRequestError(
            f"tool_choice: tools of the type {shown(kind)} are not available here", "tool_choice"
        )

    def _allow_tools(self, choice: dict[str, Any]) -> Any:
        """Keep only the allowed tools and return the mode, auto or required."""
        allowed, mode = choice.get("tools"), choice.get("mode")
        if not _is_tool_list(allowed):
            raise InvalidRequestError(f"tool_choice.tools must be {_TOOL_LIST}", "tool_choice")
        if mode not in ("auto", "required"):
            raise InvalidRequestError(
                "tool_choice.mode must be 'auto' or 'required'", "tool_choice"
            )
        names = set()
        for tool in allowed:
            if tool.get("type") in ("function", "custom"):
                names.add(self._chosen_function(tool))
            else:
                self._ignored.add(f"tool_choice.tools.{tool.get('type')}")
        self._functions = {
            name: function for name, function in self._functions.items() if name in names
        }
        if not self._functions and mode == "required":
            raise InvalidRequestError("tool_choice required needs tools", "tool_choice")
        return mode

    def _chosen_function(self, choice: dict[str, Any]) -> str:
        """Return the function name of a chosen tool; raise InvalidRequestError if not in tools."""
        name = choice.get("name")
        namespace = choice.get("namespace")
        namespace = namespace if isinstance(namespace, str) else None
        function_name = self.function_name(str(name), namespace)
        if function_name not in self._functions:
            raise InvalidRequestError(
                f"tool_choice: there is no tool {shown(name)} in tools", "tool_choice"
            )
        return function_name


def _name(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.name must be a string", "tools")
    return name


def _is_tool_list(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_LISTED_TOOLS
        and all(isinstance(member, dict) for member in value)
    )
