"""Shows how a run comes along: a bar on a terminal, nothing elsewhere."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from deploy.loadtest.openai.exchange import Exchange
from deploy.loadtest.serving.play import NobodyWatches, Pace, Watcher

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY_SECONDS: Final = 0.25


class Screen(Protocol):
    """Where runs are shown, one after the other."""

    def watching(self, name: str, pace: Pace) -> contextlib.AbstractAsyncContextManager[Watcher]:
        """Somebody to tell of one run."""
        ...


def screen_for(stream: TextIO) -> Screen:
    return Bars(stream) if stream.isatty() else NoScreen()


class NoScreen:
    """Where nobody looks."""

    @contextlib.asynccontextmanager
    async def watching(self, name: str, pace: Pace) -> AsyncIterator[Watcher]:
        yield NobodyWatches()


class Bars:
    """Drawn a few times a second, whatever happens meanwhile: drawing takes the client's time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextlib.asynccontextmanager
    async def watching(self, name: str, pace: Pace) -> AsyncIterator[Watcher]:
        counts = _Counts()
        drawing = asyncio.create_task(self._draw(name, pace, counts))
        try:
            yield counts
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

    async def _draw(self, name: str, pace: Pace, counts: "_Counts") -> None:
        begun = time.monotonic()
        with self._bars() as bars:
            task = bars.add_task(name, total=1.0, note="")
            while True:
                seconds = time.monotonic() - begun
                part = max(counts.num_ended / pace.max_requests, seconds / pace.duration)
                bars.update(task, completed=min(part, 1.0), note=counts.describe(seconds))
                bars.refresh()
                await asyncio.sleep(_EVERY_SECONDS)

    def _bars(self) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=self._stream, highlight=False),
            auto_refresh=False,
            transient=True,
        )


class _Counts:
    def __init__(self) -> None:
        self.num_ended = 0
        self._num_sent = 0
        self._num_failed = 0
        self._num_tokens = 0

    def sent(self) -> None:
        self._num_sent += 1

    def ended(self, exchange: Exchange) -> None:
        self.num_ended += 1
        self._num_failed += bool(exchange.error)
        self._num_tokens += exchange.output_tokens

    def describe(self, seconds: float) -> str:
        """In words, without what is still under way in the tokens."""
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        rate = self._num_tokens / seconds if seconds else 0.0
        under_way = self._num_sent - self.num_ended
        return f"{self.num_ended} done, {under_way} under way{failed}, {rate:.0f} tokens/s"
