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
