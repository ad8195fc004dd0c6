"""A reporter whose lines a test reads."""

from dataclasses import dataclass, field


@dataclass
class Notices:
    """Of a part that reports no progress."""

    lines: list[str] = field(default_factory=list)

    def progress(self, what: str, fraction: float | None = None, who: str = "tokend") -> None:
        raise AssertionError("nothing takes long here")

    def notice(self, message: str, who: str = "tokend") -> None:
        self.lines.append(f"{who}: {message}")
