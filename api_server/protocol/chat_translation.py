"""What the translations of /v1/messages and /v1/responses into a chat completion share."""

from collections.abc import Collection
from typing import Any

from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.fields import IgnoredFields
from proto.errors import InvalidRequestError, RequestError


class ChatTranslation:
    """A request of another API, to be answered as a chat completion."""

    def chat_request(self, *, merge_roles: bool = False) -> ChatCompletionRequest:
        """Return the request as a chat completion.

        merge_roles: for chat templates that accept few orders of roles, merge messages so that
        user and assistant alternate. Raises InvalidRequestError in the client's terms.
        """
        raise NotImplementedError

    def translate_error(self, error: RequestError) -> RequestError:
        """Return an error about the chat completion with the field names of the client's API."""
        raise NotImplementedError


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
