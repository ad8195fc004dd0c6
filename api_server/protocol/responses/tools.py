"""The tools of a request of /v1/responses, as functions of a chat, and calls of them back.

    function              weather               weather(city)
    custom                apply_patch           apply_patch(input: string)
    namespace files       read, write           files__read(…), files__write(…)
    web_search, …                               not offered

Owns the names. A tool that OpenAI runs itself is left out: the model cannot call what it was
not offered, and answers without it, as it may with any tool. A request that
forces a call of one gets a 400.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from api_server.protocol.fields import IgnoredFields, given_fields
from api_server.protocol.responses.items import CUSTOM_INPUT
from api_server.protocol.tools import MAX_TOOLS
from proto.errors import InvalidRequestError, shown

SEPARATOR: Final = "__"
"""Between a namespace and a name, which the model sees as one."""
MAX_NAME_CHARACTERS: Final = 64
"""A longer name of a tool in a namespace is cut, and ends with a digest of the whole."""
_DIGEST_BYTES: Final = 4
_LIMITS: Final = {"allowed_callers": (), "async": (False,), "defer_loading": (False,)}
_FUNCTION: Final = ("name", "description", "parameters", "strict")
_CUSTOM: Final = ("name", "description", "format")
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """What the client knows it by. namespace: "" for none. custom: its input is a text."""

    name: str
    namespace: str = ""
    custom: bool = False


class OfferedTools:
    """What the model may call, and how.

    tools, choice: as in the request. ignored: collects what is left out. Raises
    InvalidRequestError.
    """

    def __init__(
        self, tools: Sequence[dict[str, Any]], choice: Any, ignored: IgnoredFields
    ) -> None:
        self._ignored = ignored
        self._tools: dict[str, Tool] = {}
        self._functions: dict[str, dict[str, Any]] = {}
        self._places: dict[str, str] = {}
        for number, tool in enumerate(tools):
            self._add(tool, "", f"tools[{number}]")
        self._choice = self._as_in_chat(choice)

    def name_of(self, name: str, namespace: str | None) -> str:
        """What the model calls it; for tools of earlier turns too, which may not be offered now."""
        if not namespace:
            return name
        written = f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"
        if len(written) <= MAX_NAME_CHARACTERS:
            return written
        digest = blake2b(written.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return f"{written[: MAX_NAME_CHARACTERS - len(digest) - 1]}_{digest}"

    def tool_of(self, name: str) -> Tool:
        """What the client knows by the name that the model wrote."""
        return self._tools.get(name, Tool(name))

    def chat_fields(self, parallel: bool) -> dict[str, Any]:
        """The fields of a chat completion. parallel: more than one call in an answer."""
        if not self._functions:
            return {}
        return {
            "tools": list(self._functions.values()),
            "tool_choice": self._choice,
            "parallel_tool_calls": parallel,
        }

    @property
    def places(self) -> list[str]:
        """Where in the request each function of `chat_fields` comes from."""
        return [self._places[name] for name in self._functions]

    def _add(self, tool: dict[str, Any], namespace: str, where: str) -> None:
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise InvalidRequestError(f"{where}.type must be a string", "tools")
        if kind == "namespace" and not namespace:
            within = tool.get("tools")
            if not isinstance(within, list) or not all(isinstance(each, dict) for each in within):
                raise InvalidRequestError(f"{where}.tools must be a list of tools", "tools")
            for number, each in enumerate(within):
                self._add(each, self._name(tool, where), f"{where}.tools[{number}]")
        elif kind in ("function", "custom"):
            self._offer(tool, kind, namespace, where)
        else:
            self._ignored.add(f"tools.{kind}")

    def _offer(self, tool: dict[str, Any], kind: str, namespace: str, where: str) -> None:
        name = self._name(tool, where)
        written = self.name_of(name, namespace)
        if written in self._functions:
            raise InvalidRequestError(f"{where}: there is another tool of that name", "tools")
        if len(self._functions) == MAX_TOOLS:
            raise InvalidRequestError(f"there are at most {MAX_TOOLS} tools", "tools")
        taken = _FUNCTION if kind == "function" else _CUSTOM
        rest = {key: value for key, value in tool.items() if key != "type"}
        given = given_fields(rest, taken, _LIMITS, self._ignored, "tools.")
        if kind == "custom":
            if given.pop("format", {"type": "text"}) != {"type": "text"}:
                self._ignored.add("tools.format")
            given["parameters"] = _CUSTOM_PARAMETERS
        self._places[written] = where
        self._tools[written] = Tool(name, namespace, kind == "custom")
        self._functions[written] = {"type": "function", "function": given | {"name": written}}

    def _as_in_chat(self, choice: Any) -> Any:
        """auto, none, required or a function; may leave fewer tools on offer."""
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
            return {"type": "function", "function": {"name": self._chosen(choice)}}
        if kind == "allowed_tools":
            return self._allowed(choice)
        raise InvalidRequestError(
            f"tool_choice: tools of the type {shown(kind)} are not available here", "tool_choice"
        )

    def _allowed(self, choice: dict[str, Any]) -> Any:
        allowed, mode = choice.get("tools"), choice.get("mode")
        if not isinstance(allowed, list) or not all(isinstance(each, dict) for each in allowed):
            raise InvalidRequestError("tool_choice.tools must be a list of tools", "tool_choice")
        if mode not in ("auto", "required"):
            raise InvalidRequestError(
                "tool_choice.mode must be 'auto' or 'required'", "tool_choice"
            )
        names = set()
        for each in allowed:
            if each.get("type") in ("function", "custom"):
                names.add(self._chosen(each))
            else:
                self._ignored.add(f"tool_choice.tools.{each.get('type')}")
        self._functions = {name: each for name, each in self._functions.items() if name in names}
        if not self._functions and mode == "required":
            raise InvalidRequestError("tool_choice required needs tools", "tool_choice")
        return mode

    def _chosen(self, choice: dict[str, Any]) -> str:
        """What the model calls the tool that is named; raises InvalidRequestError for no such."""
        name = choice.get("name")
        namespace = choice.get("namespace")
        written = self.name_of(str(name), namespace if isinstance(namespace, str) else None)
        if written not in self._functions:
            raise InvalidRequestError(
                f"tool_choice: there is no tool {shown(name)} in tools", "tool_choice"
            )
        return written

    @staticmethod
    def _name(tool: dict[str, Any], where: str) -> str:
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"{where}.name must be a string", "tools")
        return name
