"""The live view of one front end: its watchers, and the one subscription for all of them.

    first watcher ─ Watch(wanted) ─▶ engine ─ EngineView ─▶ event for each kind of watcher ─▶ queues
    last one leaves ─ Watch(not wanted) ─▶ engine, which counts and sends nothing any more

Owns who watches and what they were shown last. An engine that takes over is asked anew; its shape
is told again if it is another one. Who does not read loses the stream, and nobody waits for it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from api_server.live_view.events import (
    NoticeKind,
    ShownView,
    Surroundings,
    Watching,
    hello_event,
    notice_event,
)
from proto.errors import OverloadedError
from proto.lifecycle import EngineReady, Role, process_title
from proto.view import EngineView

# Who the engine client tells of the engine: those who watch it, or nobody.


class Audience(Protocol):
    """Of one front end."""

    @property
    def watches(self) -> bool:
        """Somebody is there."""
        ...

    def meet(self, engine: EngineReady) -> None:
        """This is the engine of now."""
        ...

    def show(self, view: EngineView) -> None:
        """It has told this of itself."""
        ...

    def dismiss(self) -> None:
        """There is nothing more to see."""
        ...


class NoAudience:
    """Nobody may watch."""

    watches: bool = False

    def meet(self, engine: EngineReady) -> None: ...

    def show(self, view: EngineView) -> None: ...

    def dismiss(self) -> None: ...


NO_AUDIENCE: Final = NoAudience()


# One who watches: the events that wait to be written.


MAX_UNREAD: Final = 16
"""Events, of a quarter of a second each."""


class Watcher:
    """watching: as whom. over: the stream is to end when what waits is written."""

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.over = False
        self._events: deque[bytes] = deque()
        self._bell = asyncio.Event()

    def put(self, event: bytes) -> None:
        """An event to be written. One too many ends the stream, and what waits is forgotten."""
        if self.over:
            return
        if len(self._events) == MAX_UNREAD:
            self._events.clear()
            self.end()
            return
        self._events.append(event)
        self._bell.set()

    def end(self) -> None:
        """Nothing follows."""
        self.over = True
        self._bell.set()

    async def take(self, seconds: float | None) -> bytes:
        """All that waits, as soon as there is something; empty when that time is over."""
        if not self._events and not self.over:
            self._bell.clear()
            try:
                await asyncio.wait_for(self._bell.wait(), seconds)
            except TimeoutError:
                return b""
        events = b"".join(self._events)
        self._events.clear()
        return events


logger = logging.getLogger("tokend.api")

MAX_WATCHERS: Final = 16
"""Of one front end."""


class Engine(Protocol):
    """The way to the engine."""

    @property
    def engine(self) -> EngineReady: ...

    def watch(self) -> None: ...


class Feed:
    """An audience of the engine client. clock: the machine's monotonic one."""

    def __init__(
        self, around: Surroundings, client: Engine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._around = around
        self._client = client
        self._clock = clock
        self._began = clock()
        self._watchers: list[Watcher] = []
        self._hello = b""
        self._shown: ShownView | None = None

    @property
    def watches(self) -> bool:
        return bool(self._watchers)

    def join(self, watching: Watching) -> Watcher:
        """Somebody who sees hello, what was shown last, and all that follows.

        Raises OverloadedError for one too many and NotAvailableError where there is no engine yet.
        """
        self._hello = hello_event(self._around, self._client.engine)
        if len(self._watchers) >= MAX_WATCHERS:
            raise OverloadedError(f"{MAX_WATCHERS} watch already")
        watcher = Watcher(watching)
        watcher.put(self._hello)
        if self._shown is not None:
            watcher.put(self._shown.event(watching))
        self._watchers.append(watcher)
        if len(self._watchers) == 1:
            self._client.watch()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """It is gone; nothing for one that has left before."""
        if watcher not in self._watchers:
            return
        self._watchers.remove(watcher)
        if not self._watchers:
            self._shown = None
            self._client.watch()

    def meet(self, engine: EngineReady) -> None:
        hello = hello_event(self._around, engine)
        self._shown = None  # of another engine
        if hello != self._hello:
            self._hello = hello
            self._put(hello)

    def show(self, view: EngineView) -> None:
        if not self._watchers:
            return
        try:
            shown = ShownView(view, view.timestamp - self._began)
            events = {each.watching: shown.event(each.watching) for each in self._watchers}
        except Exception:  # what an engine says of itself must not cost what else it says
            logger.exception("a view could not be put into words")
            return
        self._shown = shown
        self._put_each(lambda watcher: events[watcher.watching])
        if view.preemptions:
            requests = "request" if view.preemptions == 1 else "requests"
            self.notice("preemption", f"{view.preemptions} {requests} gave way to others")

    def dismiss(self) -> None:
        for watcher in self._watchers:
            watcher.end()

    def notice(self, kind: NoticeKind, text: str) -> None:
        """Something happened that all may know."""
        if self._watchers:
            self._put(notice_event(self._clock() - self._began, kind, text))

    def restarted(self, role: Role, *, hung: bool) -> None:
        """A process was started again. hung: it did not move, and was ended for that."""
        title = process_title(role)
        if hung:
            self.notice("watchdog", f"{title} did not move: it was ended and started again")
        else:
            self.notice("restart", f"{title} was started again")

    def _put(self, event: bytes) -> None:
        self._put_each(lambda watcher: event)

    def _put_each(self, event_for: Callable[[Watcher], bytes]) -> None:
        for watcher in list(self._watchers):
            watcher.put(event_for(watcher))
            if watcher.over:  # it does not read
                self.leave(watcher)
