"""A clock that a test advances."""


class FakeClock:
    """A clock in seconds that moves only when a test sets `now`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
