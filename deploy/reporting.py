"""What tells people how far something long has come.

Work reports to a `Reporter` and does not know whether a terminal, a log or
nobody listens.
"""

from typing import Protocol


class Reporter(Protocol):
    """Hears of progress."""

    def progress(self, what: str, fraction: float | None = None) -> None:
        """`what` is under way; `fraction` of it is done, 0 to 1, None when nobody can tell."""

    def notice(self, message: str) -> None:
        """One line that should be read."""


class Silent:
    """Tells nobody."""

    def progress(self, what: str, fraction: float | None = None) -> None:
        """Nothing."""

    def notice(self, message: str) -> None:
        """Nothing."""
