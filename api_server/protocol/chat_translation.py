"""What the translations of /v1/messages and /v1/responses into a chat completion share."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.common import REQUEST_NUMBERS
from api_server.protocol.fields import CHAT_NEUTRAL, IgnoredFields, parse
from proto.errors import InvalidRequestError, RequestError

PASSED: Final = frozenset(
    {
        *("agent_hint", "session_id", "request_id", "cache_salt", "priority", "seed"),
        *("timeout_ms", "queue_timeout_ms", "stream_interval", "structured_outputs"),
        *("stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "bad_words"),
        *(REQUEST_NUMBERS.keys() - {"temperature", "top_p"}),
        *("chat_template_kwargs", "truncate_prompt_tokens", "truncation_side"),
        *("skip_reading_prefix_cache", "data_parallel_rank"),
    }
)
"""Fields of a chat completion that the other APIs lack and that this server accepts there too."""
_MESSAGE: Final = re.compile(r"\bmessages\[(\d{1,6})\](\.content\[(\d{1,6})\](?:\.image_url)?)?")
_FUNCTION: Final = re.compile(r"\btools\[(\d{1,4})\](?:\.function)?(\.parameters)?")
"""Paths of a message or of a part of its content, and of a function in a chat completion."""
_ARGUMENTS: Final = re.compile(
    r"messages\[(\d{1,6})\]\.tool_calls\[(\d{1,6})\]\.function\.arguments"
)
"""Path of the arguments of a call in a chat completion."""


class ChatTranslation:
    """A request of another API, to be answered as a chat completion.

    ignored: collects names of ignored fields. A derived class says where the client finds what an
    error names:

    _client_names: field of a chat completion → name of the same in the client's API. _mentioned:
    finds those of them that error messages mention. _places: of each message. _call_paths: of the
    arguments of calls, by the indices of the message and of the call in it. _image_paths: of
    images, by the indices of the message and of the part in it. _tool_paths: of each function.
    _parameters: what follows such a path for the function's parameters.
    """

    _client_names: Mapping[str, str]
    _mentioned: re.Pattern[str]
    _parameters = ".parameters"

    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored
        self._places: Sequence[str] = ()
        self._call_paths: Mapping[tuple[int, int], str] = {}
        self._image_paths: Mapping[tuple[int, int], str] = {}
        self._tool_paths: Sequence[str] = ()

    def chat_request(self, *, merge_roles: bool = False) -> ChatCompletionRequest:
        """Return the request as a chat completion.

        merge_roles: for chat templates that accept few orders of roles, merge messages so that
        user and assistant alternate. Raises InvalidRequestError in the client's terms.
        """
        raise NotImplementedError

    def drop_request(self) -> None:
        """Free the client's messages, which no answer needs; errors can still be translated."""
        raise NotImplementedError

    def client_path(self, path: str) -> str:
        """Return the path in the client's request of a field of the chat completion."""
        first, dot, rest = _MESSAGE.sub(self._place, path).partition(".")
        return _FUNCTION.sub(self._tool_path, self._client_names.get(first, first) + dot + rest)

    def client_message(self, message: str) -> str:
        """Return an error message about the chat completion in the terms of the client's API."""
        message = _MESSAGE.sub(self._place, message)
        message = self._mentioned.sub(lambda found: self._client_names[found.group()], message)
        return _FUNCTION.sub(self._tool_path, message)

    def _place(self, found: re.Match[str]) -> str:
        number, part = int(found[1]), found[3]
        image = None if part is None else self._image_paths.get((number, int(part)))
        if image is not None:
            return image
        known = number < len(self._places)
        place = self._places[number] if known else self._client_names.get("messages", "messages")
        return place + (found[2] or "")

    def _tool_path(self, found: re.Match[str]) -> str:
        number = int(found[1])
        if number >= len(self._tool_paths):
            return "tools"
        return self._tool_paths[number] + (self._parameters if found[2] else "")

    def _parse_chat(self, fields: Mapping[str, Any]) -> ChatCompletionRequest:
        """Return the chat completion with these fields; raise InvalidRequestError as above."""
        try:
            return parse(ChatCompletionRequest, fields, CHAT_NEUTRAL, self._ignored)
        except InvalidRequestError as error:
            raise self.translate_error(error) from None

    def translate_error(self, error: RequestError) -> RequestError:
        """Return an error about the chat completion with the field names of the client's API."""
        if not isinstance(error, InvalidRequestError):
            return error
        path = None if error.param is None else self.client_path(error.param)
        arguments, where = _ARGUMENTS.match(error.message), ""
        if arguments is not None:
            index, call = map(int, arguments.groups())
            where = self._call_paths.get((index, call), self.client_path("messages"))
        rest = error.message[arguments.end() :] if arguments else error.message
        return type(error)(where + self.client_message(rest), path)

    def ignored_fields(self) -> dict[str, list[str]]:
        """Return the field of the response that names ignored fields and tools; {} for none."""
        names = self._ignored.names()
        return {"ignored_fields": names} if names else {}

    def translate_ignored(self) -> None:
        """Give ignored fields of the chat completion their names in the client's API."""
        self._ignored.rename(self.client_path)


def split_fields(
    body: Any,
    *,
    passed: Collection[str],
    chat_only: Collection[str],
    hints: Collection[str],
    ignored: IgnoredFields,
    unused: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (fields of the client's API, fields that are passed to the chat unchanged).

    passed: names of the latter. chat_only: fields of a chat completion that the client's API does
    not have; refused unless they have their default. hints, unused: fields without effect, which
    are reported in `ignored`; hints only if they are not null. Raises InvalidRequestError.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    own_fields, chat_fields = {}, {}
    for name, value in body.items():
        if name in unused or (name in hints and value is not None):
            ignored.add(name)
        elif name in chat_only:
            if value is not None and value != ChatCompletionRequest.model_fields[name].default:
                raise InvalidRequestError(f"{name} is not available here", name)
        elif name not in passed:
            own_fields[name] = value
        if name in passed:
            chat_fields[name] = value
    return own_fields, chat_fields


def chat_only_fields(own_fields: Collection[str], passed: Collection[str]) -> Collection[str]:
    """Return the fields of a chat completion that another API neither has nor passes on."""
    return ChatCompletionRequest.model_fields.keys() - set(own_fields) - set(passed)
