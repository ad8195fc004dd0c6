"""Wakes the one task that waits for news of an HTTP request, where it has to be woken at all.

A task that is woken goes through all the coroutines that it waits in, from the server's to its
own. Most news are one token, which a plain function can tell the client as well: the task leaves
it with the bell and sleeps on.

    ring ─▶ (end of this turn of the loop) ─▶ tell() ── True ──▶ all is told
                                                  └──── False ─▶ the task wakes
"""

import asyncio
from collections.abc import Callable

Tell = Callable[[], bool]
"""Tells the client what there is; False, with nothing done, where only the task can."""


def tell_nothing() -> bool:
    """Leave it all to the task."""
    return False


class Bell:
    """Rung for each piece of news; those of one turn of the loop are told together."""

    __slots__ = ("_planned", "_rung", "_tell", "_waiter")

    def __init__(self) -> None:
        self._rung = self._planned = False
        self._waiter: asyncio.Future[None] | None = None
        self._tell: Tell = tell_nothing

    def ring(self) -> None:
        self._rung = True
        waiter = self._waiter
        if waiter is not None and not self._planned:
            self._planned = True
            waiter.get_loop().call_soon(self._answer)

    async def wait(self, tell: Tell = tell_nothing) -> None:
        """Return at once if it rang since the last call, or when it rings and `tell` is False."""
        if not self._rung:
            self._tell = tell
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rung = False

    def _answer(self) -> None:
        self._planned = False
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._tell():
            self._rung = False
        else:
            waiter.set_result(None)
