"""Time that a test moves."""


class FakeClock:
    """Seconds; stands still unless told otherwise."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
