"""How long a worker holds its memory for an engine that does not come.

Owns the time since which there is none.
"""

import math
import time
from collections.abc import Callable
from typing import Final

from proto.errors import ProcessDiedError

ENGINE_SECONDS: Final = 30.0
"""An engine is back in a second or two; one that takes longer may as well find a fresh worker."""


class EngineWait:
    """Begins when an engine is lost, and ends when the next one says something."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf

    def begin(self) -> None:
        """There is no engine; another one that did not come either changes nothing."""
        self._end = min(self._end, self._clock() + ENGINE_SECONDS)

    def end(self) -> None:
        """There is one."""
        self._end = math.inf

    def seconds_left(self) -> float | None:
        """None while nothing is waited for. Raises ProcessDiedError when the time is over."""
        left = self._end - self._clock()
        if left <= 0.0:
            raise ProcessDiedError(f"no engine has come for {ENGINE_SECONDS:g} s")
        return None if left == math.inf else left
