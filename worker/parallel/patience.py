"""When a rank says that it waits: its device has not come to the end of a step for long.

What is queued on a device may wait for other ranks, and the host cannot tell. So it says that it
waits, which keeps it from being blamed unless all do; a rank whose host hangs says nothing.
"""

import time
from collections.abc import Callable

LONG_WAIT_SECONDS = 1.0
"""Much longer than ranks are apart, and shorter than what is called a hang."""


class Patience:
    """Of one of so many ranks. on_long_wait: is called once for a step that takes long."""

    def __init__(
        self,
        num_ranks: int,
        on_long_wait: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alone = num_ranks == 1
        self._on_long_wait = on_long_wait
        self._clock = clock
        self._step: int | None = None
        self._told = False
        self._since = 0.0

    def await_step(self, step: int | None) -> None:
        """The oldest step that is not done now; None: there is none."""
        if self._alone:
            return
        if step is None or step != self._step:
            self._step, self._told, self._since = step, False, self._clock()
        elif not self._told and self._clock() - self._since >= LONG_WAIT_SECONDS:
            self._told = True
            self._on_long_wait()
