"""Progress and notices for the operator: bars on a terminal, otherwise lines of text or JSON.

Closing a display removes its bars; notices stay, and more may follow. After the start lines of text
begin with the time and the level, as those of the other processes do.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, TextIO

from proto.runtime.log_lines import notice_line, text_line
from proto.settings.config import LogFormat, LogLevel

if TYPE_CHECKING:
    from rich.progress import TaskID

    from deploy.notify import SystemdNotifier

NoticeLevel = Literal["INFO", "WARNING"]
_HIDDEN: Final[Mapping[LogLevel, Sequence[NoticeLevel]]] = {
    "debug": (),
    "info": (),
    "warning": ("INFO",),
    "error": ("INFO", "WARNING"),
}
"""Levels of the lines that are left out, by the lowest level of lines."""


def open_display(
    stream: TextIO,
    log_format: LogFormat = "text",
    notifier: "SystemdNotifier | None" = None,
    log_level: LogLevel = "info",
) -> "Display":
    """Return the display for a stream. notifier: also gets all progress.

    log_level: lowest level of lines; bars on a terminal have none.
    """
    if log_format == "text" and stream.isatty():
        return TerminalDisplay(stream, notifier, log_level)
    return Display(stream, notifier, log_format, log_level)


def error_line(message: str, log_format: LogFormat = "text") -> str:
    """Return the line that says why the command fails."""
    if log_format == "json":
        return notice_line(message, "tokend", level="ERROR")
    return f"tokend: {message}"


class Display:
    """Prints a line for each notice, and for each operation that begins."""

    def __init__(
        self,
        stream: TextIO,
        notifier: "SystemdNotifier | None" = None,
        log_format: LogFormat = "text",
        log_level: LogLevel = "info",
    ) -> None:
        self._stream = stream
        self._notifier = notifier
        self._log_format = log_format
        self._hidden = _HIDDEN[log_level]
        self._last: dict[str, str] = {}
        self._is_log = False

    def close(self) -> None:
        """End the display of progress; may be called again."""
        self._last.clear()

    def begin_log(self) -> None:
        """End the display of progress; lines have the form of the log from now on."""
        self.close()
        self._is_log = True

    def progress(
        self,
        what: str,
        fraction: float | None = None,
        process: str = "tokend",
        *,
        detail: str = "",
    ) -> None:
        """Show progress of a long operation.

        fraction: 0 to 1; None if unknown. detail: what changes all the time, for a terminal only.
        """
        if self._notifier is not None:
            self._notifier.report_starting(f"{process}: {what}", fraction)
        self._show_progress(what, fraction, process, detail)

    def notice(
        self,
        message: str,
        process: str = "tokend",
        level: NoticeLevel = "INFO",
        **fields: str | float,
    ) -> None:
        """Print a sentence. process: that it comes from. fields: of the JSON object."""
        if level in self._hidden:
            return
        if self._log_format == "json":
            line = notice_line(message, process, level, **fields)
        else:
            line = self._text_line(f"{process}: {message}", level)
        self._write_line(line)

    def event(self, process: str, what: str, level: NoticeLevel = "INFO") -> None:
        """Print an event. what: a sentence without its subject, which is the process."""
        sentence = f"{process} {what}"
        if self._log_format == "json":
            self.notice(sentence, process, level)
        elif level not in self._hidden:
            self._write_line(self._text_line(sentence, level))

    def error(self, message: str) -> None:
        line = error_line(message, self._log_format)
        is_text_log = self._is_log and self._log_format == "text"
        self._write_line(self._text_line(line, "ERROR") if is_text_log else line)

    def _text_line(self, text: str, level: str) -> str:
        if self._is_log:
            return text_line(text, level)
        return text if level == "INFO" else f"{level} {text}"

    def _show_progress(self, what: str, fraction: float | None, process: str, detail: str) -> None:
        if self._last.get(process) != what:
            self._last[process] = what
            self.notice(f"{what} …", process)

    def _write_line(self, line: str) -> None:
        # One write: print() makes two of an unbuffered stream, and a line of another process that
        # has the same stream could come in between
        self._stream.write(f"{line}\n")
        self._stream.flush()


class TerminalDisplay(Display):
    """Shows a progress bar for each process, removed at the end."""

    def __init__(
        self,
        stream: TextIO,
        notifier: "SystemdNotifier | None" = None,
        log_level: LogLevel = "info",
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        super().__init__(stream, notifier, log_level=log_level)
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=stream, highlight=False),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def close(self) -> None:
        self._bars.stop()

    def _write_line(self, line: str) -> None:
        self._bars.console.out(line)

    def _show_progress(self, what: str, fraction: float | None, process: str, detail: str) -> None:
        description = f"{process}: {what}"
        total = None if fraction is None else 1.0
        if process not in self._tasks:
            self._bars.start()
            self._tasks[process] = self._bars.add_task(description, total=total, detail=detail)
        task = self._tasks[process]
        if self._last.get(process) != what:
            self._last[process] = what
            self._bars.reset(task, total=total, description=description)
        self._bars.update(task, total=total, completed=fraction or 0.0, detail=detail)
