"""The live view of one front end: its watchers, and the one subscription for all of them.

    first watcher ─ Watch(wanted) ─▶ engine ─ EngineView ─▶ event for each kind of watcher ─▶ queues
    last one leaves ─ Watch(not wanted) ─▶ engine, which counts and sends nothing any more

Owns who watches and what they were shown last. An engine that takes over is asked anew; its shape
is told again if it is another one. Who does not read loses the stream, and nobody waits for it.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from api_server.view.events import (
    NoticeKind,
    ShownView,
    Surroundings,
    Watching,
    hello_event,
    notice_event,
)
from api_server.view.watcher import Watcher
from proto.errors import OverloadedError
from proto.lifecycle import EngineReady, Role, process_title
from proto.view import EngineView

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
