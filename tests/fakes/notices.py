"""Displays that record what they show."""

import io

from deploy.display import Display, NoticeLevel


class Notices(Display):
    """A display for components that report no progress."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.lines: list[str] = []

    def _show_progress(self, what: str, fraction: float | None, process: str, detail: str) -> None:
        raise AssertionError("nothing takes long here")

    def _write_line(self, line: str) -> None:
        self.lines.append(line)


class Recorder(Notices):
    """A display that records progress, too. calls: progress and notices in order, as texts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.steps: list[str] = []
        self.fractions: list[float] = []

    def _show_progress(self, what: str, fraction: float | None, process: str, detail: str) -> None:
        self.calls.append(what)
        self.steps.append(f"{what} {detail}")
        self.fractions.append(fraction or 0.0)

    def notice(
        self,
        message: str,
        process: str = "tokend",
        level: NoticeLevel = "INFO",
        **fields: str | float,
    ) -> None:
        self.calls.append(message)
        self.lines.append(message)
