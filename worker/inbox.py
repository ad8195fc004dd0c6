"""What the engine has sent and the worker has not served yet.

Messages are served in order, but for masks: a step asks for its own while it is served, and
by then the next step may have come before them. The engine sends masks of the oldest step in
flight only, so those that come take the place of any that nobody has asked for.
"""

from collections import deque
from collections.abc import Iterable

from proto.lifecycle import InitializeCache
from proto.scheduler_output import GrammarOutput, SchedulerOutput

FromEngine = InitializeCache | SchedulerOutput | GrammarOutput
"""All that an engine sends to a worker."""


class StepAbandonedError(Exception):
    """The engine of this step is gone, or the worker is to end."""


class Inbox:
    """Of one epoch."""

    def __init__(self) -> None:
        self._messages: deque[InitializeCache | SchedulerOutput] = deque()
        self._masks: dict[int, GrammarOutput] = {}

    def put(self, messages: Iterable[FromEngine]) -> None:
        """More has arrived."""
        for message in messages:
            if isinstance(message, GrammarOutput):
                self._masks = {message.step: message}
            else:
                self._messages.append(message)

    def next(self) -> InitializeCache | SchedulerOutput | None:
        """The oldest message that is to be served; None when there is none."""
        return self._messages.popleft() if self._messages else None

    def masks_of(self, step: int) -> GrammarOutput | None:
        """The masks of a step, once; None when they are not here."""
        return self._masks.pop(step, None)
