"""Ids of tool calls as the chat template takes them.

    call_d38175f2a077c9e32ea553d9      5d1f09c3e       where the template wants 9 characters
    aB3dE6gH9                          aB3dE6gH9       as it is: it has so many

Owns that. Ids are ours, or of whoever began the conversation, and only have to show which result
belongs to which call. The same id becomes the same each time, so that what was computed for a
conversation is found again.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any


def with_ids_of_length(
    messages: Sequence[Mapping[str, Any]], length: int
) -> Sequence[Mapping[str, Any]]:
    """length: of an id, in characters; 0 for any, which changes nothing."""
    return [_with_ids(message, length) for message in messages] if length else messages


def _with_ids(message: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    changed = dict(message)
    if isinstance(changed.get("tool_call_id"), str):
        changed["tool_call_id"] = _fitting(changed["tool_call_id"], length)
    if changed.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _fitting(call["id"], length)} if "id" in call else call
            for call in changed["tool_calls"]
        ]
    return changed


def _fitting(given: str, length: int) -> str:
    if len(given) == length and given.isascii() and given.isalnum():
        return given
    return blake2b(given.encode(), digest_size=32).hexdigest()[:length]
