"""A display that records its lines."""

from dataclasses import dataclass, field


@dataclass
class Notices:
    """A display for components that report no progress."""

    lines: list[str] = field(default_factory=list)

    def progress(
        self,
        what: str,
        fraction: float | None = None,
        process: str = "tokend",
        *,
        detail: str = "",
    ) -> None:
        raise AssertionError("nothing takes long here")

    def notice(
        self, message: str, process: str = "tokend", level: str = "INFO", **fields: str | float
    ) -> None:
        self.lines.append(f"{'' if level == 'INFO' else level + ' '}{process}: {message}")

    def event(self, process: str, what: str, level: str = "INFO") -> None:
        self.notice(what, process, level)


@dataclass
class Recorder(Notices):
    """A display that records progress, too. calls: progress and notices in order, as texts."""

    calls: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)

    def progress(
        self,
        what: str,
        fraction: float | None = None,
        process: str = "tokend",
        *,
        detail: str = "",
    ) -> None:
        self.calls.append(what)
        self.steps.append(f"{what} {detail}")
        self.fractions.append(fraction or 0.0)

    def notice(
        self, message: str, process: str = "tokend", level: str = "INFO", **fields: str | float
    ) -> None:
        self.calls.append(message)
        self.lines.append(message)
