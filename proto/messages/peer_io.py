"""Messages between the front ends of a daemon, about the responses that each of them keeps.

    front end ──PeerCall──▶ the front end that keeps the response ──PeerReply──▶ front end

Results are JSON, so that no type here is untyped or recursive.
"""

from typing import Literal

import msgspec

ResponseOperation = Literal["get", "input_items", "conversation", "cancel", "delete"]
"""get: the response. input_items: the conversation before it. conversation: that and the output of
a finished response. cancel: end it and get it. delete: remove it."""
PeerOperation = ResponseOperation | Literal["find_items"]
"""find_items: the items of any stored response that have these ids, by their ids."""


class PeerCall(msgspec.Struct, array_like=True, tag=70, frozen=True):
    """An operation. tenant, key_name: of the client that asks for it.

    ids: of the response; of items for `find_items`.
    """

    call_id: int
    operation: PeerOperation
    tenant: int
    key_name: str
    ids: tuple[str, ...]


class PeerReply(msgspec.Struct, array_like=True, tag=71, frozen=True):
    """The result of a call; None if the client has no such response.

    result: of `get` and `cancel` the pieces of one text in JSON; else a text in JSON for each item.
    """

    call_id: int
    result: tuple[bytes, ...] | None


PeerMessage = PeerCall | PeerReply
