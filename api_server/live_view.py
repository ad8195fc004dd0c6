"""The live view of one front end: its subscribers, and the events that they get.

    first subscriber ─ Watch(wanted) ─▶ engine ─ EngineView ─▶ one event per scope ─▶ queues
    last one leaves ─ Watch(not wanted) ─▶ the engine sends no more views

Each subscriber sees one engine, which it chooses. The engine client sends `Watch` and passes the
views on. After a change of an engine, its properties are published again if they differ. A
subscriber that does not read its stream is dropped.

Events are server-sent: hello, view, notice. What a subscriber may see of a request is decided here:
id and counts of its own tenant's requests; of other requests only the state and the number of
blocks, which the block map shows anyway.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from proto.codec import to_compact_json
from proto.errors import OverloadedError
from proto.messages.lifecycle import EngineReady, Role, process_title
from proto.messages.view import (
    ADAPTER_STATES,
    REQUEST_STATES,
    BlockMap,
    EngineView,
    RequestView,
    blocks_per_cell,
)
from proto.settings.lora_modules import FOR_ALL, LoRAAccess

logger = logging.getLogger("tokend.api")

NoticeKind = Literal["preemption", "restart", "watchdog", "reload", "drain"]

MAX_UNREAD: Final = 16
"""Most events in a subscriber's queue; a view is published every quarter of a second."""
MAX_SUBSCRIBERS: Final = 16
"""Most subscribers of one front end."""
MIN_RATE_SECONDS: Final = 0.1
"""Shortest interval between two views that gives a rate; in a shorter one, a single step would
appear as thousands of tokens per second."""


@dataclass(frozen=True, slots=True)
class SubscriberScope:
    """What a subscriber may see.

    reader: its id from `reader_of`. sees_all: it is an operator. key_name: of its API key.
    engine: index of the engine that it sees.
    """

    reader: int
    sees_all: bool = False
    key_name: str = ""
    engine: int = 0


class EncodedView:
    """One view, to be encoded for each scope.

    time_s: seconds since the server started. access: to adapters.
    """

    def __init__(self, view: EngineView, time_s: float, access: LoRAAccess) -> None:
        self._access = access
        self._view = view
        self._time_s = time_s
        self._cells = b',"cells":' + to_compact_json(cells_of(view.blocks))
        if view.num_state_slots:
            self._cells += b',"state_cells":' + to_compact_json(cells_of(view.states))

    def event_for(self, scope: SubscriberScope) -> bytes:
        """Return the event with what subscribers of this scope may see."""
        view = self._view
        fields: dict[str, Any] = {
            "time_s": round(self._time_s, 3),
            "step": view.step,
            "running": view.num_running,
            "waiting": view.num_waiting,
            "prompt_tokens_per_s": rate(view.prompt_tokens, view.seconds),
            "generation_tokens_per_s": rate(view.generation_tokens, view.seconds),
            "prefix_cache_queries": view.queried_tokens,
            "prefix_cache_hits": view.found_tokens,
            "preemptions": view.preemptions,
            "drafts": view.num_drafts,
            "draft_tokens": view.draft_tokens,
            "accepted_tokens": view.accepted_tokens,
            "state_slots": view.num_state_slots,
            "held_states": view.num_held_states,
            "step_limit": view.step_limit,
            "tiers": [
                {"medium": tier.medium, "blocks": tier.num_blocks, "used": tier.num_used}
                for tier in view.tiers
            ],
            "requests": [
                request_fields(request, is_visible=scope.sees_all or request.reader == scope.reader)
                for request in view.requests
            ],
            "num_omitted_requests": view.more_requests,
            "adapters": [
                {
                    "name": adapter.name,
                    "state": ADAPTER_STATES[adapter.state],
                    "running": adapter.num_running,
                    "requests": adapter.num_unfinished,
                    "bytes": adapter.num_bytes,
                }
                for adapter in view.adapters
                if scope.sees_all or self._access.allows(adapter.name, scope.key_name)
            ],
        }
        return _event(b"view", to_compact_json(fields)[:-1] + self._cells + b"}")


def request_fields(request: RequestView, *, is_visible: bool) -> dict[str, Any]:
    """Return the JSON fields of a request. is_visible: the subscriber may see id and counts."""
    return {
        "owner": request.owner,
        "id": (request.label or None) if is_visible else None,
        "state": REQUEST_STATES[request.state],
        "prompt_tokens": request.prompt_tokens if is_visible else None,
        "output_tokens": request.output_tokens if is_visible else None,
        "computed_tokens": request.computed_tokens if is_visible else None,
        "cached_tokens": request.cached_tokens if is_visible else None,
        "num_blocks": request.num_blocks,
        "adapter": (request.adapter or None) if is_visible else None,
        "images": request.num_images if is_visible else None,
    }


def cells_of(blocks: BlockMap) -> list[list[int]]:
    """Return [length, state, owner] for each run of equal cells."""
    columns = (
        np.frombuffer(blocks.lengths, "<i4"),
        np.frombuffer(blocks.states, np.uint8),
        np.frombuffer(blocks.owners, "<i4"),
    )
    cells: list[list[int]] = np.stack(columns, axis=1).tolist()
    return cells


def rate(number: int, seconds: float) -> float:
    """Return `number` per second; 0 for intervals shorter than MIN_RATE_SECONDS."""
    return round(number / seconds, 1) if seconds >= MIN_RATE_SECONDS else 0.0


class Subscriber:
    """The queue of events of one client.

    scope: what it may see, of which engine. finished: the stream ends when the queue is empty.
    """

    def __init__(self, scope: SubscriberScope) -> None:
        self.scope = scope
        self.finished = False
        self._events: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def enqueue_event(self, event: bytes) -> None:
        """Queue an event; if the queue is full, clear it and end the stream."""
        if self.finished:
            return
        if len(self._events) == MAX_UNREAD:
            self._events.clear()
            self.end()
            return
        self._events.append(event)
        self._changed.set()

    def end(self) -> None:
        self.finished = True
        self._changed.set()

    async def drain_events(self, timeout_seconds: float | None) -> bytes:
        """Return all queued events once there is one; empty after a timeout."""
        if not self._events and not self.finished:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_seconds)
            except TimeoutError:
                return b""
        events = b"".join(self._events)
        self._events.clear()
        return events


class LiveViewPublisher:
    """Publish the views of the current engines to the subscribers.

    model, version, max_num_seqs: of the daemon; a reload may rename the model, in the hello events
    that follow. clock: monotonic seconds. access: to adapters. num_engines: to choose from.
    """

    def __init__(
        self,
        model: str,
        version: str,
        max_num_seqs: int,
        clock: Callable[[], float] = time.monotonic,
        access: LoRAAccess = FOR_ALL,
        num_engines: int = 1,
    ) -> None:
        self._access = access
        self._num_engines = num_engines
        self.model = model
        self._version = version
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._start = clock()
        self._subscribers: list[Subscriber] = []
        self._hello: dict[int, bytes] = {}
        self._last_view: dict[int, EncodedView] = {}

    def has_subscribers(self, engine: int) -> bool:
        return any(subscriber.scope.engine == engine for subscriber in self._subscribers)

    def subscribe(self, scope: SubscriberScope, engine: EngineReady) -> Subscriber:
        """Add a subscriber; it gets the hello event, the last view, and all events that follow.

        engine: the properties of the one that it sees. Raises OverloadedError when there are
        MAX_SUBSCRIBERS.
        """
        hello = self._hello[scope.engine] = self._hello_event(scope.engine, engine)
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise OverloadedError(f"the live view has {MAX_SUBSCRIBERS} subscribers already")
        subscriber = Subscriber(scope)
        subscriber.enqueue_event(hello)
        last_view = self._last_view.get(scope.engine)
        if last_view is not None:
            subscriber.enqueue_event(last_view.event_for(scope))
        self._subscribers.append(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
            if not self.has_subscribers(subscriber.scope.engine):
                self._last_view.pop(subscriber.scope.engine, None)

    def on_engine_ready(self, index: int, engine: EngineReady) -> None:
        """Publish hello again if the current engine of an index has other properties."""
        hello = self._hello_event(index, engine)
        self._last_view.pop(index, None)  # of another engine
        if hello != self._hello.get(index):
            self._hello[index] = hello
            for subscriber in self._subscribers_of(index):
                self._send(subscriber, hello)

    def publish_view(self, index: int, view: EngineView) -> None:
        """Publish the view of an engine to the subscribers that see it."""
        subscribers = self._subscribers_of(index)
        if not subscribers:
            return
        try:
            encoded = EncodedView(view, view.timestamp - self._start, self._access)
            scopes = {subscriber.scope for subscriber in subscribers}
            events = {scope: encoded.event_for(scope) for scope in scopes}
        except Exception:  # a bad view must not stop the engine's outputs
            logger.exception("a view could not be encoded")
            return
        self._last_view[index] = encoded
        for subscriber in subscribers:
            self._send(subscriber, events[subscriber.scope])
        if view.preemptions:
            requests = "request was" if view.preemptions == 1 else "requests were"
            notice = self._notice_event("preemption", f"{view.preemptions} {requests} preempted")
            for subscriber in subscribers:
                self._send(subscriber, notice)

    def publish_notice(self, kind: NoticeKind, text: str) -> None:
        notice = self._notice_event(kind, text)
        for subscriber in list(self._subscribers):
            self._send(subscriber, notice)

    def publish_restart(self, role: Role, *, hung: bool, engine: int | None = None) -> None:
        """Publish the restart of a process. engine: index of the engine that is concerned."""
        title = process_title(role)
        if engine is not None and self._num_engines > 1:
            title += f" {engine}" if role == "engine_core" else f" of engine {engine}"
        if hung:
            self.publish_notice("watchdog", f"{title} hung: it was killed and restarted")
        else:
            self.publish_notice("restart", f"{title} was restarted")

    def close(self) -> None:
        for subscriber in self._subscribers:
            subscriber.end()

    def _hello_event(self, index: int, engine: EngineReady) -> bytes:
        """Return the event with the properties of daemon and engine, which precedes their views."""
        hello = {
            "model": self.model,
            "version": self._version,
            "num_blocks": engine.num_blocks,
            "block_size": engine.block_size,
            "blocks_per_cell": blocks_per_cell(engine.num_blocks + 1),  # with block 0
            "max_num_seqs": self._max_num_seqs,
            "max_model_len": engine.max_model_len,
            "engine": index,
            "num_engines": self._num_engines,
        }
        return _event(b"hello", to_compact_json(hello))

    def _notice_event(self, kind: NoticeKind, text: str) -> bytes:
        """Return the event of something that happened now."""
        notice = {"time_s": round(self._clock() - self._start, 3), "kind": kind, "text": text}
        return _event(b"notice", to_compact_json(notice))

    def _subscribers_of(self, engine: int) -> list[Subscriber]:
        return [each for each in self._subscribers if each.scope.engine == engine]

    def _send(self, subscriber: Subscriber, event: bytes) -> None:
        subscriber.enqueue_event(event)
        if subscriber.finished:  # it does not read
            self.unsubscribe(subscriber)


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + data + b"\n\n"
