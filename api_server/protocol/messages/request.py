"""The requests of POST /v1/messages and /v1/messages/count_tokens, and the same as a chat's.

Owns the fields of Anthropic's API. What it has in common with chat (see `PASSED`) is checked there;
messages and tools have modules of their own. Names in errors are those that the client used.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import BeforeValidator, Field

from api_server.protocol.chat import ChatCompletionRequest, not_too_many
from api_server.protocol.common import SAMPLING_NUMBERS, StopString, Strict, Text
from api_server.protocol.fields import (
    CHAT_NEUTRAL,
    MESSAGES_HINTS,
    MESSAGES_NEUTRAL,
    IgnoredFields,
    given_fields,
    parse,
)
from api_server.protocol.messages.blocks import ChatMessages, MessageTools
from proto.errors import InvalidRequestError, RequestError, shown

Json = dict[str, Any]
Asked = TypeVar("Asked", bound="Conversing")

PASSED: Final = frozenset(
    {
        *("agent_hint", "session_id", "request_id", "cache_salt", "priority", "seed"),
        *("timeout_ms", "queue_timeout_ms", "stream_interval", "structured_outputs"),
        *("stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "bad_words"),
        *(SAMPLING_NUMBERS.keys() - {"temperature", "top_p"}),
        *("chat_template_kwargs", "truncate_prompt_tokens", "truncation_side"),
    }
)
"""Fields beyond Anthropic's that mean here what they mean in a chat completion."""

_NAMES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "thinking_token_budget": "thinking",
    "parallel_tool_calls": "tool_choice",
    "continue_final_message": "messages",
}
"""What a field of a chat completion was called by the client."""
_MENTIONED: Final = re.compile(
    r"^stop\b|\bresponse_format\.json_schema\b|\bresponse_format\b|\bthinking_token_budget\b"
)
_WORDS: Final = _NAMES | {"response_format.json_schema": "output_config.format"}
_MESSAGE: Final = re.compile(r"\bmessages\.(\d{1,6})")
_FUNCTION: Final = re.compile(r"\btools\[(\d{1,4})\](?:\.function)?(\.parameters)?")
_TOO_LONG: Final = re.compile(r"the prompt has (\d+) tokens, the maximum context length is (\d+)")

_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Of Anthropic's → those that templates know."""
_THINKING: Final = ("enabled", "disabled", "adaptive", "between_tools")
_DISPLAYS: Final = (None, "summarized", "omitted")
_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which templates let a model think."""


class Conversing(Strict):
    """What is there to be read by the model: the fields of both requests."""

    model: Text
    """Name of a served model."""
    messages: Annotated[
        list[Json],
        Field(min_length=1),
        BeforeValidator(not_too_many),
    ]
    """The conversation: up to 4096 messages of user, assistant and system, of text, tool_use,
    tool_result and thinking. One of the assistant at the end is gone on with."""
    system: Text | list[Json] | None = None
    """What stands before it, a text or blocks of text."""
    tools: list[Json] = []
    """What the model may call. Tools with a type of Anthropic's are left out, and named in
    X-Tokend-Ignored."""
    tool_choice: Json | None = None
    """auto, any, tool (with a name) or none; disable_parallel_tool_use."""
    thinking: Json | None = None
    """enabled (with budget_tokens), disabled, adaptive; display omitted leaves the text out. Has
    no effect on a model that does not think."""
    output_config: Json | None = None
    """format: json_schema; effort, for templates that know efforts."""
    output_format: Json | None = None
    """The older name of output_config.format."""


class MessagesRequest(Conversing):
    max_tokens: Annotated[int, Field(ge=1)]
    """Most output tokens, thoughts included; where the context leaves fewer, as many as it does."""
    stream: bool = False
    """Answer with server-sent events."""
    stop_sequences: list[StopString] = []
    """Up to 4 strings at which the answer ends; they are not part of it."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many likeliest tokens; 0 for all."""


_ONLY_CHATS: Final = (
    ChatCompletionRequest.model_fields.keys() - MessagesRequest.model_fields.keys() - PASSED
)
"""What says something in a chat completion has other words here, or no place."""
_ONLY_ANSWERS: Final = MessagesRequest.model_fields.keys() - Conversing.model_fields.keys()
_SAMPLING: Final = ("temperature", "top_p", "top_k")


def parse_request(
    model: type[Asked], body: Any, ignored: IgnoredFields
) -> tuple[Asked, dict[str, Any]]:
    """The request, and those of its fields that are passed on to chat as they are.

    ignored: collects what has no effect. Raises InvalidRequestError.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    counts = model is Conversing
    passed = {name: value for name, value in body.items() if name in PASSED}
    rest = {}
    for name, value in body.items():
        if (counts and name in _ONLY_ANSWERS) or (name in MESSAGES_HINTS and value is not None):
            ignored.add(name)
        elif name in _ONLY_CHATS:
            if value is not None and value != ChatCompletionRequest.model_fields[name].default:
                raise InvalidRequestError(f"{name} is not available here", name)
        elif name not in PASSED and name != "cache_control":  # what can be cached, is
            rest[name] = value
    request = parse(model, rest, MESSAGES_NEUTRAL, ignored)
    _check_edits(body.get("context_management"), ignored)
    return request, passed


def _check_edits(wanted: Any, ignored: IgnoredFields) -> None:
    """Edits make a long conversation shorter; without them all of it is read."""
    edits = wanted.get("edits") if isinstance(wanted, dict) else None
    for edit in edits if isinstance(edits, list) else []:
        if isinstance(edit, dict):
            ignored.add(f"context_management.{shown(edit.get('type'))}")


class ChatTranslation:
    """A request in the words of a chat completion.

    template_names: of the variables that the chat template reads; thinks: the model has thoughts
    whose number can be limited. Raises InvalidRequestError.
    """

    def __init__(
        self,
        request: Conversing,
        passed: Mapping[str, Any],
        system: str,
        ignored: IgnoredFields,
        *,
        template_names: frozenset[str],
        thinks: bool,
    ) -> None:
        self._request = request
        self._system = system
        self._ignored = ignored
        self._tools = MessageTools(request.tools, request.tool_choice, ignored)
        self._places: Sequence[int] = ()
        self._fields: Json = {
            **passed,
            "model": request.model,
            "response_format": _response_format(request, ignored),
            **self._tools.chat_fields(),
        }
        if isinstance(request, MessagesRequest):
            self._fields |= {"stream": request.stream, "stop": request.stop_sequences}
            given = request.model_fields_set
            self._fields |= {name: getattr(request, name) for name in _SAMPLING if name in given}
        variables = _variables(request, template_names, ignored)
        if variables:
            own = passed.get("chat_template_kwargs")
            own = own if isinstance(own, dict) else {}
            self._fields["chat_template_kwargs"] = variables | own
        budget = thinking_of(request).get("budget_tokens")
        if budget is not None and thinks:
            self._fields["thinking_token_budget"] = budget

    def request(self, *, folded: bool = False) -> ChatCompletionRequest:
        """folded: for templates that take few orders of roles (see message_blocks)."""
        read = ChatMessages(self._system, self._ignored, folded=folded)
        read.read(self._request.messages)
        self._places = read.places
        fields = self._fields | {"messages": read.messages}
        if read.continues:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        try:
            return parse(ChatCompletionRequest, fields, CHAT_NEUTRAL, self._ignored)
        except InvalidRequestError as error:
            raise self.in_client_names(error) from None

    def in_client_names(self, error: RequestError) -> RequestError:
        """The same error with the names and places that the fields have in this API."""
        if not isinstance(error, InvalidRequestError):
            return error
        name = error.param
        if name is not None:
            first, dot, rest = name.partition(".")
            name = self._placed(_NAMES.get(first, first) + dot + rest)
        return InvalidRequestError(self._placed(_words(error.message)), name)

    def _placed(self, text: str) -> str:
        return _FUNCTION.sub(self._tool, _MESSAGE.sub(self._message, text))

    def _message(self, found: re.Match[str]) -> str:
        number = int(found.group(1))
        place = self._places[number] if number < len(self._places) else -1
        return "system" if place < 0 else f"messages.{place}"

    def _tool(self, found: re.Match[str]) -> str:
        number, places = int(found.group(1)), self._tools.places
        if number >= len(places):
            return "tools"
        return f"tools.{places[number]}" + (".input_schema" if found.group(2) else "")


def thinking_of(request: Conversing) -> Json:
    """What is said of thoughts; raises InvalidRequestError for what cannot be meant."""
    thinking = request.thinking or {"type": "adaptive"}
    if thinking.get("type") not in _THINKING:
        raise InvalidRequestError(
            f"thinking.type must be one of {', '.join(_THINKING)}", "thinking.type"
        )
    if thinking.get("display") not in _DISPLAYS:
        raise InvalidRequestError(
            "thinking.display must be 'summarized' or 'omitted'", "thinking.display"
        )
    budget = thinking.get("budget_tokens")
    if thinking["type"] != "enabled":
        return {name: value for name, value in thinking.items() if name != "budget_tokens"}
    if type(budget) is not int or budget < 1:
        raise InvalidRequestError(
            "thinking.budget_tokens must be a whole number of at least 1", "thinking.budget_tokens"
        )
    return thinking


def shows_thoughts(request: Conversing) -> bool:
    return thinking_of(request).get("display") != "omitted"


def _variables(request: Conversing, names: frozenset[str], ignored: IgnoredFields) -> Json:
    """Of the template: whether to think, and how hard."""
    found: Json = {}
    if request.thinking is not None:
        kind = thinking_of(request)["type"]
        known = [name for name in _SWITCHES if name in names]
        if kind in ("enabled", "disabled"):
            found |= dict.fromkeys(known, kind == "enabled")
        if kind == "enabled" and not known:
            ignored.add("thinking")
    effort = (request.output_config or {}).get("effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise InvalidRequestError(
                f"output_config.effort must be one of {', '.join(_EFFORTS)}", "output_config"
            )
        if "reasoning_effort" in names:
            found["reasoning_effort"] = _EFFORTS[effort]
        else:
            ignored.add("output_config.effort")
    return found


def _response_format(request: Conversing, ignored: IgnoredFields) -> Json | None:
    config = given_fields(
        request.output_config or {}, ("format", "effort"), {}, ignored, "output_config."
    )
    where, wanted = "output_config.format", config.get("format")
    if wanted is None:
        where, wanted = "output_format", request.output_format
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise InvalidRequestError(f"{where}.type must be 'json_schema'", where)
    given = given_fields(wanted, ("type", "schema"), {}, ignored, f"{where}.")
    if not isinstance(given.get("schema"), dict):
        raise InvalidRequestError(f"{where}.schema must be a JSON schema", where)
    schema = {"name": "answer", "schema": given["schema"]}
    return {"type": "json_schema", "json_schema": schema}


def _words(message: str) -> str:
    """A message of chat's; agents look for the words about a prompt that is too long."""
    too_long = _TOO_LONG.search(message)
    if too_long:
        return f"prompt is too long: {too_long.group(1)} tokens > {too_long.group(2)} maximum"
    if "longer than the maximum context length" in message:
        return f"prompt is too long: {message}"
    return _MENTIONED.sub(lambda found: _WORDS[found.group()], message)
