"""The live view of one front end: its subscribers, and the events that they get.

    first subscriber ─ Watch(wanted) ─▶ engine ─ EngineView ─▶ one event per scope ─▶ queues
    last one leaves ─ Watch(not wanted) ─▶ the engine sends no more views

The engine client sends `Watch` and passes the views on. After a change of the engine, its
properties are published again if they differ. A subscriber that does not read its stream is
dropped.
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

    scope: what it may see. finished: the stream ends when the queue is empty.
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
    """Publish the views of the current engine to the subscribers.

    model, version, max_num_seqs: of the daemon; a reload may rename the model, in the hello events
    that follow. clock: monotonic seconds. access: to adapters.
    """

    def __init__(
        self,
        model: str,
        version: str,
        max_num_seqs: int,
        clock: Callable[[], float] = time.monotonic,
        access: LoRAAccess = FOR_ALL,
    ) -> None:
        self._access = access
        self.model = model
        self._version = version
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._start = clock()
        self._subscribers: list[Subscriber] = []
        self._hello = b""
        self._last_view: EncodedView | None = None

    @property
    def has_subscribers(self) -> bool:
        return bool(self._subscribers)

    def subscribe(self, scope: SubscriberScope, engine: EngineReady) -> Subscriber:
        """Add a subscriber; it gets the hello event, the last view, and all events that follow.

        engine: the properties of the current one. Raises OverloadedError when there are
        MAX_SUBSCRIBERS.
        """
        self._hello = self._hello_event(engine)
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise OverloadedError(f"the live view has {MAX_SUBSCRIBERS} subscribers already")
        subscriber = Subscriber(scope)
        subscriber.enqueue_event(self._hello)
        if self._last_view is not None:
            subscriber.enqueue_event(self._last_view.event_for(scope))
        self._subscribers.append(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
            if not self._subscribers:
                self._last_view = None

    def on_engine_ready(self, engine: EngineReady) -> None:
        """Publish hello again if the current engine has other properties."""
        hello = self._hello_event(engine)
        self._last_view = None  # of another engine
        if hello != self._hello:
            self._hello = hello
            self._publish_event(hello)

    def publish_view(self, view: EngineView) -> None:
        if not self._subscribers:
            return
        try:
            encoded = EncodedView(view, view.timestamp - self._start, self._access)
            scopes = {subscriber.scope for subscriber in self._subscribers}
            events = {scope: encoded.event_for(scope) for scope in scopes}
        except Exception:  # a bad view must not stop the engine's outputs
            logger.exception("a view could not be encoded")
            return
        self._last_view = encoded
        for subscriber in list(self._subscribers):
            self._send(subscriber, events[subscriber.scope])
        if view.preemptions:
            requests = "request was" if view.preemptions == 1 else "requests were"
            self.publish_notice("preemption", f"{view.preemptions} {requests} preempted")

    def publish_notice(self, kind: NoticeKind, text: str) -> None:
        if self._subscribers:
            self._publish_event(notice_event(self._clock() - self._start, kind, text))

    def publish_restart(self, role: Role, *, hung: bool) -> None:
        title = process_title(role)
        if hung:
            self.publish_notice("watchdog", f"{title} hung: it was killed and restarted")
        else:
            self.publish_notice("restart", f"{title} was restarted")

    def close(self) -> None:
        for subscriber in self._subscribers:
            subscriber.end()

    def _hello_event(self, engine: EngineReady) -> bytes:
        return hello_event(self.model, self._version, self._max_num_seqs, engine)

    def _publish_event(self, event: bytes) -> None:
        for subscriber in list(self._subscribers):
            self._send(subscriber, event)

    def _send(self, subscriber: Subscriber, event: bytes) -> None:
        subscriber.enqueue_event(event)
        if subscriber.finished:  # it does not read
            self.unsubscribe(subscriber)
