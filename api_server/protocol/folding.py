"""Messages of a chat for templates that take few orders of roles.

    system       "be brief"                        system       "be brief"
    user         "on a Linux machine"            ┐ user         "on a Linux machine
    user         "weather?"                      ┘               weather?"
    assistant    weather(…)                        assistant    weather(…)
    tool         "21 °C"                         ┐ tool         "21 °C
    user         "And tomorrow?"                 ┘               And tomorrow?"

Owns that reading: a later system message is the user's, words of the user in a row are one
message, and what follows the result of a tool is a part of it.
"""

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def folded(messages: Sequence[Json]) -> list[Json]:
    """The same conversation; contents of all but the assistant's are texts."""
    found: list[Json] = []
    for message in messages:
        role = message["role"]
        if found and role in ("system", "user"):
            before = found[-1]
            if before["role"] in ("user", "tool"):
                texts = (before["content"], message["content"])
                found[-1] = before | {"content": "\n".join(each for each in texts if each)}
                continue
            role = "user"
        found.append({**message, "role": role})
    return found
