"""What the translations of /v1/messages and /v1/responses into a chat completion share."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.fields import IgnoredFields
from proto.errors import InvalidRequestError, RequestError

_ARGUMENTS: Final = re.compile(
    r"messages\[(\d{1,6})\]\.tool_calls\[(\d{1,6})\]\.function\.arguments"
)
"""Path of the arguments of a call in a chat completion."""


class ChatTranslation:
    """A request of another API, to be answered as a chat completion.

    ignored: collects names of ignored fields. A derived class sets `_call_paths`: paths in the
    client's request of the arguments of calls, by the indices of the message and of the call in it.
    """

    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored
        self._call_paths: Mapping[tuple[int, int], str] = {}

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
        raise NotImplementedError

    def client_message(self, message: str) -> str:
        """Return an error message about the chat completion in the terms of the client's API."""
        raise NotImplementedError

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
