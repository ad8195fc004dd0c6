"""The live view of one API server: its subscribers, and the one subscription of the engine.

    first subscriber ─ Watch(wanted) ─▶ engine ─ EngineView ─▶ one event per scope ─▶ queues
    last one leaves ─ Watch(not wanted) ─▶ the engine sends no more views

A new engine is asked again; its shape is sent again if it differs. A subscriber that does not read
its stream is dropped.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from api_server.live_view.events import (
    NoticeKind,
    ServerInfo,
    ShownView,
    SubscriberScope,
    hello_event,
    notice_event,
)
from proto.errors import OverloadedError
from proto.lifecycle import EngineReady, Role, process_title
from proto.view import EngineView

MAX_UNREAD: Final = 16
"""Events in a queue, one per quarter of a second."""


class Subscriber:
    """The queue of events of one client.

    scope: what it may see. finished: the stream ends when the queue is empty.
    """

    def __init__(self, scope: SubscriberScope) -> None:
        self.scope = scope
        self.finished = False
        self._events: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def put(self, event: bytes) -> None:
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
        """End the stream after the queued events."""
        self.finished = True
        self._changed.set()

    async def take(self, seconds: float | None) -> bytes:
        """Return all queued events once there is one; empty after this time."""
        if not self._events and not self.finished:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), seconds)
            except TimeoutError:
                return b""
        events = b"".join(self._events)
        self._events.clear()
        return events


logger = logging.getLogger("tokend.api")

MAX_SUBSCRIBERS: Final = 16
"""Of one API server."""


class Engine(Protocol):
    """The engine client, as far as the live view needs it."""

    @property
    def engine(self) -> EngineReady: ...

    def watch(self) -> None: ...


class LiveViewPublisher:
    """Publish the views of the current engine to the subscribers. clock: monotonic."""

    def __init__(
        self, around: ServerInfo, client: Engine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._around = around
        self._client = client
        self._clock = clock
        self._began = clock()
        self._subscribers: list[Subscriber] = []
        self._hello = b""
        self._shown: ShownView | None = None

    @property
    def is_watched(self) -> bool:
        return bool(self._subscribers)

    def subscribe(self, scope: SubscriberScope) -> Subscriber:
        """Add a subscriber; it gets the hello event, the last view, and all that follow.

        Raises OverloadedError when there are MAX_SUBSCRIBERS, NotAvailableError before an engine is
        connected.
        """
        self._hello = hello_event(self._around, self._client.engine)
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise OverloadedError(f"{MAX_SUBSCRIBERS} clients watch already")
        subscriber = Subscriber(scope)
        subscriber.put(self._hello)
        if self._shown is not None:
            subscriber.put(self._shown.event(scope))
        self._subscribers.append(subscriber)
        if len(self._subscribers) == 1:
            self._client.watch()
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove a subscriber; nothing for one that was removed before."""
        if subscriber not in self._subscribers:
            return
        self._subscribers.remove(subscriber)
        if not self._subscribers:
            self._shown = None
            self._client.watch()

    def on_engine_ready(self, engine: EngineReady) -> None:
        """Send hello again if the current engine has another shape."""
        hello = hello_event(self._around, engine)
        self._shown = None  # of another engine
        if hello != self._hello:
            self._hello = hello
            self._put(hello)

    def publish(self, view: EngineView) -> None:
        """Send a view of the current engine to all subscribers."""
        if not self._subscribers:
            return
        try:
            shown = ShownView(view, view.timestamp - self._began)
            events = {each.scope: shown.event(each.scope) for each in self._subscribers}
        except Exception:  # a bad view must not stop the engine's outputs
            logger.exception("a view could not be encoded")
            return
        self._shown = shown
        self._put_all(lambda subscriber: events[subscriber.scope])
        if view.preemptions:
            requests = "request" if view.preemptions == 1 else "requests"
            self.notice("preemption", f"{view.preemptions} {requests} were preempted")

    def close(self) -> None:
        """End all streams."""
        for subscriber in self._subscribers:
            subscriber.end()

    def notice(self, kind: NoticeKind, text: str) -> None:
        """Send an event about the daemon to all subscribers."""
        if self._subscribers:
            self._put(notice_event(self._clock() - self._began, kind, text))

    def restarted(self, role: Role, *, hung: bool) -> None:
        """Report that a process was restarted. hung: its watchdog had killed it."""
        title = process_title(role)
        if hung:
            self.notice("watchdog", f"{title} hung: it was killed and restarted")
        else:
            self.notice("restart", f"{title} was restarted")

    def _put(self, event: bytes) -> None:
        self._put_all(lambda subscriber: event)

    def _put_all(self, event_for: Callable[[Subscriber], bytes]) -> None:
        for subscriber in list(self._subscribers):
            subscriber.put(event_for(subscriber))
            if subscriber.finished:  # it does not read
                self.unsubscribe(subscriber)
