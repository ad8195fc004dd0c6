"""The live view of one front end: its subscribers, and the events that they get.

    first subscriber ─ Watch(wanted) ─▶ engine ─ EngineView ─▶ one event per scope ─▶ queues
    last one leaves ─ Watch(not wanted) ─▶ the engine sends no more views

Each subscriber sees one engine, which it chooses. The engine client sends `Watch` and passes the
views on. After a change of an engine, its properties are published again if they differ. A
subscriber that does not read its stream is dropped.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from api_server.live_view.events import (
    EncodedView,
    NoticeKind,
    SubscriberScope,
    hello_event,
    notice_event,
)
from proto.errors import OverloadedError
from proto.messages.lifecycle import EngineReady, Role, process_title
from proto.messages.view import EngineView
from proto.settings.lora_modules import FOR_ALL, LoRAAccess

logger = logging.getLogger("tokend.api")

MAX_UNREAD: Final = 16
"""Most events in a subscriber's queue; a view is published every quarter of a second."""
MAX_SUBSCRIBERS: Final = 16
"""Most subscribers of one front end."""


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
            text = f"{view.preemptions} {requests} preempted"
            notice = notice_event(self._clock() - self._start, "preemption", text)
            for subscriber in subscribers:
                self._send(subscriber, notice)

    def publish_notice(self, kind: NoticeKind, text: str) -> None:
        if self._subscribers:
            self._publish_event(notice_event(self._clock() - self._start, kind, text))

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
        limit = self._max_num_seqs
        return hello_event(self.model, self._version, limit, engine, index, self._num_engines)

    def _subscribers_of(self, engine: int) -> list[Subscriber]:
        return [each for each in self._subscribers if each.scope.engine == engine]

    def _publish_event(self, event: bytes) -> None:
        for subscriber in list(self._subscribers):
            self._send(subscriber, event)

    def _send(self, subscriber: Subscriber, event: bytes) -> None:
        subscriber.enqueue_event(event)
        if subscriber.finished:  # it does not read
            self.unsubscribe(subscriber)
