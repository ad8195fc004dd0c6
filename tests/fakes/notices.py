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

    def notice(self, message: str, process: str = "tokend") -> None:
        self.lines.append(f"{process}: {message}")
