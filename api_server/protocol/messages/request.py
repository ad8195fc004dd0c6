"""The requests of /v1/messages and /v1/messages/count_tokens (Anthropic), and their translation.

The fields of `PASSED` mean the same as in a chat completion and are checked there. Errors use the
names of the client's API.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field

from api_server.protocol.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    REASONING_SWITCHES,
    ChatCompletionRequest,
)
from api_server.protocol.chat_translation import (
    PASSED,
    ChatTranslation,
    chat_only_fields,
    split_fields,
)
from api_server.protocol.common import StopStringList, Text
from api_server.protocol.fields import (
    MESSAGES_HINTS,
    MESSAGES_NEUTRAL,
    IgnoredFields,
    Strict,
    given_fields,
    most_elements,
    parse,
)
from api_server.protocol.images import image_paths
from api_server.protocol.messages.input import BlockTranslator
from api_server.protocol.tools import MAX_LISTED_TOOLS
from proto.errors import InvalidRequestError, require, shown

Json = dict[str, Any]
Request = TypeVar("Request", bound="CountTokensRequest")

_CLIENT_NAMES: Final = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking",
    "parallel_tool_calls": "tool_choice",
    "continue_final_message": "messages",
}
"""Field of a chat completion → name of the same in the client's API."""
_TOO_LONG: Final = re.compile(r"maximum context length is (\d+) .* it has (\d+) tokens")

_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_THINKING_TYPES: Final = ("enabled", "disabled", "adaptive", "between_tools")
_DISPLAYS: Final = (None, "summarized", "omitted")
_TOOL_FIELDS: Final = ("name", "description", "input_schema", "strict")
_IGNORED_TOOL_FIELDS: Final = frozenset(
    {"type", "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers"}
)
"""Fields that tell Anthropic's servers how to cache, stream or find a tool."""
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE_FIELDS: Final = ("type", "name", "disable_parallel_tool_use")


class CountTokensRequest(Strict):
    """The request of /v1/messages/count_tokens: what the model reads."""

    model: Text
    """Name of a served model."""
    messages: Annotated[
        list[Json],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        most_elements(MAX_MESSAGES, "messages"),
    ]
    """The conversation: up to 4096 messages of user, assistant and system, with blocks of text,
    image (for a model that reads images, also in a tool_result), tool_use, tool_result and
    thinking. The answer continues an assistant message at the end."""
    system: Text | Annotated[list[Json], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    """The system prompt, a string or text blocks."""
    tools: Annotated[list[Json], Field(fail_fast=True, max_length=MAX_LISTED_TOOLS)] = []
    """Tools that the model may call. Tools of Anthropic's servers are left out and named in
    ignored_fields."""
    tool_choice: Json | None = None
    """auto, any, tool (with a name) or none; disable_parallel_tool_use."""
    thinking: Json | None = None
    """enabled (with budget_tokens), disabled, adaptive; display omitted leaves the text out. Has
    no effect on a model without reasoning."""
    output_config: Json | None = None
    """format: json_schema; effort, for templates that know efforts."""
    output_format: Json | None = None
    """The older name of output_config.format."""


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    """Most output tokens, reasoning included; fewer if the context leaves fewer."""
    stream: bool = False
    """Answer with server-sent events."""
    stop_sequences: StopStringList = []
    """Up to 1024 strings, of 64 KiB together, at which the answer ends; its text does not contain
    them."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many likeliest tokens; 0 for all."""


_CHAT_ONLY: Final = chat_only_fields(MessagesRequest.model_fields, PASSED)
_ANSWER_ONLY: Final = MessagesRequest.model_fields.keys() - CountTokensRequest.model_fields.keys()
"""Fields about the answer, which have no effect on the number of prompt tokens."""
_SAMPLING: Final = ("temperature", "top_p", "top_k")


def parse_request(
    model: type[Request], body: Any, ignored: IgnoredFields
) -> tuple[Request, dict[str, Any]]:
    """Return the request, and its fields that are passed to the chat unchanged.

    ignored: collects fields without effect. Raises InvalidRequestError.
    """
    own_fields, passed = split_fields(
        body,
        passed=PASSED,
        chat_only=_CHAT_ONLY,
        hints=MESSAGES_HINTS,
        ignored=ignored,
        unused=_ANSWER_ONLY if model is CountTokensRequest else (),
    )
    own_fields.pop("cache_control", None)  # all prefixes are cached
    request = parse(model, own_fields, MESSAGES_NEUTRAL, ignored)
    _report_context_edits(body.get("context_management"), ignored)
    return request, passed


def _report_context_edits(context_management: Any, ignored: IgnoredFields) -> None:
    """Report edits that would shorten a long conversation; all of it is read instead."""
    edits = context_management.get("edits") if isinstance(context_management, dict) else None
    for edit in edits if isinstance(edits, list) else []:
        if isinstance(edit, dict):
            ignored.add(f"context_management.{shown(edit.get('type'))}")


class MessagesTranslation(ChatTranslation):
    """A request of /v1/messages, translated into a chat completion.

    template_names: variables that the chat template reads. has_reasoning: the model has reasoning
    that a budget can limit. Raises InvalidRequestError.
    """

    _mentioned = re.compile(
        r"^stop\b|\bresponse_format(?:\.json_schema)?\b|\bthinking_token_budget\b"
    )
    _parameters = ".input_schema"

    def __init__(
        self,
        request: CountTokensRequest,
        passed: Mapping[str, Any],
        system: str,
        ignored: IgnoredFields,
        *,
        template_names: frozenset[str],
        has_reasoning: bool,
    ) -> None:
        super().__init__(ignored)
        self._request = request
        self._system = system
        self._tools = MessageTools(request.tools, request.tool_choice, ignored)
        self._tool_paths = self._tools.paths
        format_field, output_format = _output_format(request, ignored)
        self._client_names = _CLIENT_NAMES | {
            "response_format": format_field,
            "response_format.json_schema": format_field,
        }
        self._fields: Json = {
            **passed,
            "model": request.model,
            "response_format": output_format,
            **self._tools.chat_fields(),
        }
        if isinstance(request, MessagesRequest):
            self._fields |= {"stream": request.stream, "stop": request.stop_sequences}
            given = request.model_fields_set
            self._fields |= {name: getattr(request, name) for name in _SAMPLING if name in given}
        effort = _effort(request, template_names, ignored)
        if effort is not None:
            self._fields["reasoning_effort"] = effort
        variables = _template_variables(request, template_names, ignored)
        if variables:
            client_variables = passed.get("chat_template_kwargs")
            client_variables = client_variables if isinstance(client_variables, dict) else {}
            self._fields["chat_template_kwargs"] = variables | client_variables
        budget = thinking_options(request).get("budget_tokens")
        if budget is not None and has_reasoning:
            self._fields["thinking_token_budget"] = budget

    def chat_request(self, *, merge_roles: bool = False) -> ChatCompletionRequest:
        translator = BlockTranslator(self._system, self._ignored, merge_roles=merge_roles)
        translator.append_messages(self._request.messages)
        self._places = translator.places
        self._call_paths = translator.call_paths
        self._image_paths = image_paths(translator.messages, translator.image_paths)
        fields = self._fields | {"messages": translator.messages}
        if translator.continues_last_message:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return self._parse_chat(fields)

    def drop_request(self) -> None:
        del self._request, self._fields

    def client_message(self, message: str) -> str:
        """Agents look for "prompt is too long" to shorten their conversation."""
        too_long = _TOO_LONG.search(message)
        if too_long:
            return f"prompt is too long: {too_long.group(2)} tokens > {too_long.group(1)} maximum"
        if "maximum context length is" in message:
            return f"prompt is too long: {message}"
        return super().client_message(message)


def thinking_options(request: CountTokensRequest) -> Json:
    """Return the field `thinking`, or its default; raise InvalidRequestError if it is invalid."""
    thinking = request.thinking or {"type": "adaptive"}
    kinds = ", ".join(_THINKING_TYPES)
    require(thinking.get("type") in _THINKING_TYPES, "thinking.type", f"must be one of {kinds}")
    is_known = thinking.get("display") in _DISPLAYS
    require(is_known, "thinking.display", "must be 'summarized' or 'omitted'")
    budget = thinking.get("budget_tokens")
    if thinking["type"] != "enabled":
        return {name: value for name, value in thinking.items() if name != "budget_tokens"}
    if type(budget) is not int or budget < 1:
        raise InvalidRequestError(
            "thinking.budget_tokens must be a whole number of at least 1", "thinking.budget_tokens"
        )
    return thinking


def shows_reasoning(request: CountTokensRequest) -> bool:
    return thinking_options(request).get("display") != "omitted"


def _template_variables(
    request: CountTokensRequest, names: frozenset[str], ignored: IgnoredFields
) -> Json:
    """Return the chat template's variables for `thinking`."""
    variables: Json = {}
    if request.thinking is not None:
        kind = thinking_options(request)["type"]
        switches = [name for name in REASONING_SWITCHES if name in names]
        if kind in ("enabled", "disabled"):
            variables |= dict.fromkeys(switches, kind == "enabled")
        if kind == "enabled" and not switches:
            ignored.add("thinking")
    return variables


def _effort(
    request: CountTokensRequest, names: frozenset[str], ignored: IgnoredFields
) -> str | None:
    """Return the effort if the chat template reads one."""
    effort = (request.output_config or {}).get("effort")
    if effort is None:
        return None
    if effort not in _EFFORTS:
        raise InvalidRequestError(
            f"output_config.effort must be one of {', '.join(_EFFORTS)}", "output_config"
        )
    if "reasoning_effort" not in names:
        ignored.add("output_config.effort")
        return None
    return str(effort)


def _output_format(request: CountTokensRequest, ignored: IgnoredFields) -> tuple[str, Json | None]:
    """Return the format's field, and its value as the `response_format` of a chat completion."""
    config = given_fields(
        request.output_config or {}, ("format", "effort"), {}, ignored, "output_config."
    )
    where, output_format = "output_config.format", config.get("format")
    if output_format is None:
        where, output_format = "output_format", request.output_format
    if output_format is None:
        return where, None
    if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
        raise InvalidRequestError(f"{where}.type must be 'json_schema'", where)
    given = given_fields(output_format, ("type", "schema"), {}, ignored, f"{where}.")
    if not isinstance(given.get("schema"), dict):
        raise InvalidRequestError(f"{where}.schema must be a JSON schema", where)
    schema = {"name": "answer", "schema": given["schema"]}
    return where, {"type": "json_schema", "json_schema": schema}


class MessageTools:
    """The tools of a request, translated into functions of a chat.

    {name, description, input_schema}      {"type": "function", "function": {name, description, …}}
    tool_choice auto, any, tool, none      auto, required, a function by its name, none
    disable_parallel_tool_use              parallel_tool_calls

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
        if not isinstance(kind, str) or kind not in _CHOICES:
            raise InvalidRequestError(
                "tool_choice.type must be 'auto', 'any', 'tool' or 'none'", "tool_choice"
            )
        return _CHOICES[kind], not once


def _function(tool: Json, where: str, ignored: IgnoredFields) -> Json:
    rest = {name: value for name, value in tool.items() if name not in _IGNORED_TOOL_FIELDS}
    given = given_fields(rest, _TOOL_FIELDS, {}, ignored, "tools.")
    require(isinstance(given.get("name"), str), f"{where}.name", "must be a string")
    is_object = isinstance(given.get("input_schema"), dict)
    require(is_object, f"{where}.input_schema", "must be a JSON schema of an object")
    given["parameters"] = given.pop("input_schema")
    return {"type": "function", "function": given}
