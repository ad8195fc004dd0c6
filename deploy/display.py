"""Shows people what goes on while something long runs: bars on a terminal, lines elsewhere.

Closing a display takes the bars away; notices stay, and may still come after.
"""

from typing import TYPE_CHECKING, Protocol, TextIO

from proto.config import LogFormat
from proto.log_lines import notice_line

if TYPE_CHECKING:
    from rich.progress import TaskID


# What tells people how far something long has come.
#
# Work reports to a `Reporter` and does not know whether a terminal, a log or
# nobody listens.


class Reporter(Protocol):
    """Hears of progress. `who` is at work: tokend itself, or one of its processes."""

    def progress(self, what: str, fraction: float | None = None, who: str = "tokend") -> None:
        """`what` is under way; `fraction` of it is done, 0 to 1, None when nobody can tell."""

    def notice(self, message: str, who: str = "tokend") -> None:
        """One line that should be read."""


class Display(Reporter, Protocol):
    """A reporter that may hold the screen until it is closed."""

    def close(self) -> None:
        """No progress follows; may be called again."""


def open_display(stream: TextIO, log_format: LogFormat = "text") -> Display:
    """The display that suits the stream, and who reads it."""
    if log_format == "json":
        return JsonDisplay(stream)
    return TerminalDisplay(stream) if stream.isatty() else PlainDisplay(stream)


class PlainDisplay:
    """A line whenever somebody begins something else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, str] = {}

    def close(self) -> None:
        self._last.clear()

    def progress(self, what: str, fraction: float | None = None, who: str = "tokend") -> None:
        if self._last.get(who) != what:
            self._last[who] = what
            self.notice(f"{what} …", who)

    def notice(self, message: str, who: str = "tokend") -> None:
        self._write_line(f"{who}: {message}")

    def _write_line(self, line: str) -> None:
        # One write: print() makes two of an unbuffered stream, and a line of another process that
        # has the same stream could come in between
        self._stream.write(f"{line}\n")
        self._stream.flush()


class JsonDisplay(PlainDisplay):
    """The same lines, each a JSON object."""

    def notice(self, message: str, who: str = "tokend") -> None:
        self._write_line(notice_line(message, who))


class TerminalDisplay:
    """A line with a bar for each of those at work, taken away at the end."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._tasks: dict[str, TaskID] = {}
        self._what: dict[str, str] = {}
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=Console(file=stream, highlight=False),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def close(self) -> None:
        self._bars.stop()

    def progress(self, what: str, fraction: float | None = None, who: str = "tokend") -> None:
        description = f"{who}: {what}"
        total = None if fraction is None else 1.0
        if who not in self._tasks:
            self._bars.start()
            self._tasks[who] = self._bars.add_task(description, total=total)
        task = self._tasks[who]
        if self._what.get(who) != what:
            self._what[who] = what
            self._bars.reset(task, total=total, description=description)
        self._bars.update(task, total=total, completed=fraction or 0.0)

    def notice(self, message: str, who: str = "tokend") -> None:
        self._bars.console.print(f"{who}: {message}", markup=False)
