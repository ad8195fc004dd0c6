"""What the phases of a reload touch, and what they have in common.

Owns nothing: processes are reached by `Hands` only, so that every order of events can be tried.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deploy.births import Births, Born
from deploy.ending import Endable
from deploy.obituary import Deceased
from deploy.recovery import Recovery
from proto.codec import Message
from proto.lifecycle import ProcessBoot
from proto.prepared_model import PreparedModel


class Member(Endable, Deceased, Born, Protocol):
    """What a reload starts, ends and sees die."""

    def tell(self, message: Message) -> None: ...


class Preparation(Protocol):
    """The model is looked at once more."""

    def has_ended(self) -> bool: ...

    def result(self) -> PreparedModel:
        """Of one that has ended; raises ModelError."""
        ...


class Hands(Protocol):
    """What a reload does to processes."""

    def prepare(self) -> Preparation:
        """Begin to, and wake up when it is over; raises OSError."""
        ...

    def let_go(self, preparation: Preparation) -> None:
        """Nobody needs it any more."""
        ...

    def fits(self) -> bool:
        """Whether there is memory for one more generation beside that of now."""
        ...

    def start(self, boot: ProcessBoot) -> None:
        """Raises OSError."""
        ...

    def members(self, generation: int) -> list[Member]:
        """Engine and workers that live."""
        ...

    def tell_front_ends(self, message: Message) -> None: ...


@dataclass(frozen=True)
class Surface:
    """What all phases touch.

    num_front_ends, num_workers: of a generation. clock: monotonic seconds.
    conclude: called once in each reload: why the old generation goes on, or "", and whether
    to try again.
    """

    births: Births
    recovery: Recovery
    hands: Hands
    strategy: str
    num_front_ends: int
    num_workers: int
    clock: Callable[[], float]
    conclude: Callable[[str, bool], None]

    def start(self, births: Births) -> None:
        """Start engine and workers."""
        for rank in range(self.num_workers):
            self.hands.start(births.boot("worker", rank))
        self.hands.start(births.boot("engine_core", 0))


class Phase:
    """Nothing is under way; and what the phases have in common."""

    idle = False

    def __init__(self, on: Surface) -> None:
        self._on = on

    def press(self) -> "Phase":
        """The loop has turned."""
        return self

    def seconds_left(self) -> float | None:
        """How long nothing is to do though nothing happens; None for ever."""
        return None

    def note(self, message: Message) -> "Phase":
        """A process said something."""
        return self

    def owns(self, dead: Member) -> bool:
        """Whether this death is the affair of the reload, and of nobody else."""
        return False

    def is_ending(self, process: Member) -> bool:
        """It was asked to end."""
        return False

    def cut_off(self, hung: Member) -> "Phase":
        """It will be killed; what it says until then is to reach nobody."""
        return self

    def note_death(self, dead: Member) -> "Phase":
        """Of any process."""
        return self

    def give_up(self, why: str) -> "Phase":
        """The daemon is about to end: do nothing that is not needed for the requests there are."""
        return self


class Idle(Phase):
    """There is one generation."""

    idle = True
