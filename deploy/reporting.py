"""What tells people how far something long has come.

Work reports to a `Reporter` and does not know whether a terminal, a log or
nobody listens.
"""

from typing import Protocol


class Reporter(Protocol):
    """Hears of progress. `who` is at work: tokend itself, or one of its processes."""

    def progress(self, what: str, fraction: float | None = None, who: str = "tokend") -> None:
        """`what` is under way; `fraction` of it is done, 0 to 1, None when nobody can tell."""

    def notice(self, message: str, who: str = "tokend") -> None:
        """One line that should be read."""
