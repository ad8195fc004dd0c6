"""Responses in memory: those that are stored, and those that are running.

Stored responses are limited in bytes and number, in total and per client, and in age. A client
sees only its own. If a client exceeds its limits, its oldest response is dropped first.

    add_running ─▶ running ─▶ store_response ─▶ stored ─▶ expired, dropped for space, or deleted
                      └────▶ remove_running (not to be stored, or failed)
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from api_server.generation.encoders.base import json_parts
from proto.messages.peer_io import ResponseOperation

if TYPE_CHECKING:
    from api_server.generation.encoders.responses.encoder import ResponsesEncoder
    from api_server.generation.stream import TokenStream

MAX_STORED: Final = 4096
MAX_STORED_PER_OWNER: Final = 1024
OWNER_SHARE: Final = 4
"""A client may use at most one part in this many of the bytes."""

Owner = tuple[int, str]
"""(tenant, name of the API key)"""
Json = dict[str, Any]
_Key = tuple[Owner, str]


@dataclass(frozen=True, slots=True)
class History:
    """The items of a conversation. num_bytes: of their JSON."""

    items: list[Json]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response.

    items: of the conversation, including those of the response. expires_at: monotonic seconds.
    """

    response: Json
    items: list[Json]
    num_bytes: int
    expires_at: float

    @property
    def input_items(self) -> list[Json]:
        """The items of the conversation before the response."""
        return self.items[: len(self.items) - len(self.response["output"])]


@dataclass(slots=True)
class RunningResponse:
    """A response that is being generated."""

    stream: "TokenStream"
    encoder: "ResponsesEncoder"
    _is_cancelled: bool = False

    def snapshot(self) -> Json:
        """Return the response with all output so far."""
        return self.encoder.snapshot("cancelled" if self._is_cancelled else "in_progress")

    def cancel(self) -> Json:
        """Stop the generation and return the response; further calls change nothing."""
        self._is_cancelled = True
        self.stream.cancel()
        return self.snapshot()


class StoredResponses:
    """The responses of one front end.

    max_bytes: of all stored responses; 0 stores nothing. max_age: seconds. clock: monotonic time.
    """

    def __init__(self, max_bytes: int, max_age: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._running: dict[_Key, RunningResponse] = {}
        self._stored: OrderedDict[_Key, StoredResponse] = OrderedDict()
        self._bytes: dict[Owner, int] = {}
        self._counts: dict[Owner, int] = {}
        self._holders: dict[_Key, dict[str, None]] = {}
        """(client, id of an item) → ids of the stored responses with the item, the newest last."""

    @property
    def max_entry_bytes(self) -> int:
        """Largest size of a response with its conversation."""
        return self._max_bytes // OWNER_SHARE

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def __len__(self) -> int:
        return len(self._stored)

    def add_running(self, owner: Owner, response_id: str, response: RunningResponse) -> None:
        """Add a running response. It replaces one of the same id."""
        self._running[owner, response_id] = response

    def remove_running(self, owner: Owner, response_id: str, response: RunningResponse) -> None:
        """Remove a running response unless another has replaced it."""
        if self._running.get((owner, response_id)) is response:
            del self._running[owner, response_id]

    def find_running(self, owner: Owner, response_id: str) -> RunningResponse | None:
        """Return a response that still generates; a finished one is found only as stored."""
        running = self._running.get((owner, response_id))
        is_finished = running is None or running.encoder.final_response is not None
        return None if is_finished else running

    def run_operation(
        self, operation: ResponseOperation, owner: Owner, response_id: str
    ) -> Any | None:
        """Return the result of an operation as JSON; None if the client has no such response."""
        running = self.find_running(owner, response_id)
        stored = self.find_stored(owner, response_id)
        if operation == "cancel" and running is not None:
            return running.cancel()
        if running is not None and running.encoder.record is not None:
            if operation == "get":
                return running.snapshot()
            if operation == "input_items":
                return running.encoder.record.history.items
        if stored is None:
            return None
        match operation:
            case "get" | "cancel":
                return stored.response
            case "input_items":
                return stored.input_items
            case "conversation":
                return stored.items
            case "delete":
                return self.delete_stored(owner, response_id)

    def store_response(self, owner: Owner, response: Json, before: History) -> None:
        """Store a finished response; drop older ones if a limit is exceeded.

        before: the conversation before the response.
        """
        response_id, output = response["id"], response["output"]
        said = said_items(output)
        items = [*before.items, *said]
        self.delete_stored(owner, response_id)
        output_size = json_size(said)  # once, because it can be long
        size = json_size(response | {"output": []}) + 2 * output_size + before.num_bytes
        size += _logprobs_size(output)
        if size > self.max_entry_bytes:
            return
        self._drop_expired()
        while (
            self._bytes.get(owner, 0) + size > self.max_entry_bytes
            or self._counts.get(owner, 0) >= MAX_STORED_PER_OWNER
        ):
            self._drop(next(key for key in self._stored if key[0] == owner))
        while self.num_bytes + size > self._max_bytes or len(self._stored) >= MAX_STORED:
            self._drop(next(iter(self._stored)))
        self._stored[owner, response_id] = StoredResponse(
            response, items, size, self._clock() + self._max_age
        )
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self._counts[owner] = self._counts.get(owner, 0) + 1
        for item in items:
            self._holders.setdefault((owner, item["id"]), {})[response_id] = None

    def find_stored(self, owner: Owner, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        return self._stored.get((owner, response_id))

    def find_items(self, owner: Owner, item_ids: Collection[str]) -> dict[str, Json]:
        """Return the items with these ids of a client's stored responses, by their ids.

        An item of several responses is that of the newest.
        """
        self._drop_expired()
        wanted: dict[str, set[str]] = {}  # response id → ids of items
        for item_id in item_ids:
            if holders := self._holders.get((owner, item_id)):
                wanted.setdefault(next(reversed(holders)), set()).add(item_id)
        return {
            item["id"]: item
            for response_id, ids in wanted.items()
            for item in self._stored[owner, response_id].items
            if item["id"] in ids
        }

    def delete_stored(self, owner: Owner, response_id: str) -> bool:
        """Delete a stored response; return False if there is none of this id."""
        self._drop_expired()
        if (owner, response_id) not in self._stored:
            return False
        self._drop((owner, response_id))
        return True

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._stored and next(iter(self._stored.values())).expires_at <= now:
            self._drop(next(iter(self._stored)))

    def _drop(self, key: _Key) -> None:
        owner, response_id = key
        dropped = self._stored.pop(key)
        self._bytes[owner] -= dropped.num_bytes
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._bytes[owner], self._counts[owner]
        for item in dropped.items:
            holders = self._holders.get((owner, item["id"]), {})  # none for a repeated id
            holders.pop(response_id, None)
            if not holders:
                self._holders.pop((owner, item["id"]), None)


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """Where one response is stored when it is finished. history: before the response."""

    store: StoredResponses
    owner: Owner
    history: History

    def save_response(self, response: Json) -> None:
        self.store.store_response(self.owner, response, self.history)


def said_items(output: Sequence[Json]) -> list[Json]:
    """Return the items of an output as a conversation has them: without log-probabilities."""
    return [
        item | {"content": [part | {"logprobs": []} for part in item["content"]]}
        if item["type"] == "message"
        else item
        for item in output
    ]


def _logprobs_size(output: Sequence[Json]) -> int:
    """Return about how many bytes the log-probabilities of an output take."""
    parts = [part for item in output if item["type"] == "message" for part in item["content"]]
    return sum(part["logprobs"].num_bytes for part in parts if part["logprobs"])


def json_size(value: Any) -> int:
    """Return the size of a JSON value in bytes, as the limits count it."""
    return sum(map(len, json_parts(value)))  # in parts, so that other threads can run
