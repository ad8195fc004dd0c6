"""Responses that clients asked to be kept, and those that are under way.

Kept in memory, per client and invisible to other clients, within limits of bytes and entries (in
total and per client) and of time. The oldest response of a client above its limits is dropped
first.

    enter ─▶ under way ─▶ keep ─▶ stored ─▶ too old, too many, or deleted
                   └────▶ leave (not to be stored, or failed on its way)
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

MAX_STORED: Final = 4096
MAX_STORED_PER_OWNER: Final = 1024
OWNERS_SHARE: Final = 4
"""One client has at most this part of the bytes."""

Owner = tuple[int, str]
"""Tenant and name of the key."""
Json = dict[str, Any]
_Key = tuple[Owner, str]


class UnderWay(Protocol):
    """A response that is being generated."""

    @property
    def stored(self) -> bool:
        """It may be asked for."""
        ...

    def so_far(self) -> Json: ...

    def cancel(self) -> Json:
        """End it, and what it is then. Later calls do nothing more."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """response: as clients get it. items: the conversation, the response's own included.

    until: monotonic seconds.
    """

    response: Json
    items: list[Json]
    num_bytes: int
    until: float


class StoredResponses:
    """Of one API server. max_bytes: 0 stores nothing. seconds: how long. clock: monotonic."""

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._under_way: dict[_Key, UnderWay] = {}
        self._stored: OrderedDict[_Key, Stored] = OrderedDict()
        self._bytes: dict[Owner, int] = {}
        self._counts: dict[Owner, int] = {}

    @property
    def max_entry_bytes(self) -> int:
        """No conversation that is longer can be stored."""
        return self._max_bytes // OWNERS_SHARE

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def __len__(self) -> int:
        return len(self._stored)

    def enter(self, owner: Owner, name: str, response: UnderWay) -> None:
        """It begins. Where a client uses an id again, the later one counts."""
        self._under_way[owner, name] = response

    def leave(self, owner: Owner, name: str, response: UnderWay) -> None:
        """Remove a running response; nothing for one that is not listed."""
        if self._under_way.get((owner, name)) is response:
            del self._under_way[owner, name]

    def under_way(self, owner: Owner, name: str) -> UnderWay | None:
        return self._under_way.get((owner, name))

    def keep(self, owner: Owner, response: Json, items: list[Json]) -> None:
        """Store a finished response, within the limits of size and time."""
        name = response["id"]
        self.drop(owner, name)
        size = num_bytes(response) + num_bytes(items)
        if size > self.max_entry_bytes:
            return
        self._expire()
        while (
            self._bytes.get(owner, 0) + size > self.max_entry_bytes
            or self._counts.get(owner, 0) >= MAX_STORED_PER_OWNER
        ):
            self._drop(next(key for key in self._stored if key[0] == owner))
        while self.num_bytes + size > self._max_bytes or len(self._stored) >= MAX_STORED:
            self._drop(next(iter(self._stored)))
        self._stored[owner, name] = Stored(response, items, size, self._clock() + self._seconds)
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self._counts[owner] = self._counts.get(owner, 0) + 1

    def find(self, owner: Owner, name: str) -> Stored | None:
        self._expire()
        return self._stored.get((owner, name))

    def drop(self, owner: Owner, name: str) -> bool:
        """Forget it; False where there is none."""
        self._expire()
        if (owner, name) not in self._stored:
            return False
        self._drop((owner, name))
        return True

    def _expire(self) -> None:
        now = self._clock()
        while self._stored and next(iter(self._stored.values())).until <= now:
            self._drop(next(iter(self._stored)))

    def _drop(self, key: _Key) -> None:
        owner = key[0]
        gone = self._stored.pop(key)
        self._bytes[owner] -= gone.num_bytes
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._bytes[owner], self._counts[owner]


def num_bytes(value: Any) -> int:
    """What a JSON value counts for."""
    return len(json.dumps(value))
