"""Tells the supervisor that steps complete, which is what it takes for progress."""

import time
from collections.abc import Callable
from typing import Final

from proto.lifecycle import Heartbeat
from proto.sockets import Link

PULSE_SECONDS: Final = 0.5
"""Between two messages; the first step of new workers is told at once."""


class Pulse:
    """Owns when it was felt last."""

    def __init__(self, supervisor: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._supervisor = supervisor
        self._clock = clock
        self._due = 0.0
        self._worker_epoch = 0

    def beat(self, worker_epoch: int, step: int) -> None:
        """A step is complete."""
        now = self._clock()
        if now >= self._due or worker_epoch != self._worker_epoch:
            self._due = now + PULSE_SECONDS
            self._worker_epoch = worker_epoch
            self._supervisor.send(Heartbeat(worker_epoch, step))
