"""Breaking things on purpose, so that tests can see that they mend.

    TOKEND_FAULTS="worker:raise@20, engine:kill@50x2, worker1:slow@10"

    ROLE[INDEX]  worker, engine
    ACTION       raise   an exception
                 kill    SIGKILL to itself
                 hang    nothing happens any more
                 slow    this step and all that follow take a second longer
                 nan     the step's hidden states are no numbers (workers only)
    @STEP        before this step with tokens, counted from 1 in the life of the process
    xLIVES       also in the lives after the first, so many in all

Owns the text form and the counting of steps. The supervisor passes faults on only
where --enable-fault-injection says so.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from proto.errors import ConfigError

Action = Literal["raise", "kill", "hang", "slow", "nan"]
SLOW_SECONDS: Final = 1.0
_FORM: Final = re.compile(r"(worker|engine)(\d*):(raise|kill|hang|slow|nan)@(\d+)(?:x(\d+))?")


class InjectedFaultError(Exception):
    """What the action "raise" raises."""


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """One thing that is to break. role: "worker" or "engine_core". lives: in the first so many."""

    role: str
    index: int
    action: Action
    step: int
    lives: int = 1


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults that a text asks for; raises ConfigError for one that is none."""
    return tuple(_parse(each.strip()) for each in text.split(",") if each.strip())


def _parse(word: str) -> Fault:
    found = _FORM.fullmatch(word)
    if found is None or (found[1] == "engine" and found[3] == "nan"):
        raise ConfigError(f"TOKEND_FAULTS: {word!r} is not of the form worker:raise@20")
    role = "engine_core" if found[1] == "engine" else "worker"
    action: Action = found[3]  # type: ignore[assignment]
    return Fault(role, int(found[2] or 0), action, int(found[4]), int(found[5] or 1))


class FaultInjector:
    """Carries out the faults of one life of one process; without any it does nothing."""

    def __init__(
        self, faults: Iterable[Fault], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._faults = tuple(faults)
        self._sleep = sleep
        self._step = 0
        self.breaks_numbers = False

    @classmethod
    def of(
        cls, faults: Iterable[Fault], role: str, index: int, incarnation: int
    ) -> "FaultInjector":
        """Of those that are meant for this life of this process."""
        return cls(
            each
            for each in faults
            if (each.role, each.index) == (role, index) and incarnation < each.lives
        )

    @property
    def idle(self) -> bool:
        """There is nothing to break."""
        return not self._faults

    def begin_step(self) -> None:
        """A step with tokens is about to begin. breaks_numbers: and its numbers are to be none."""
        self._step += 1
        self.breaks_numbers = False
        for fault in self._faults:
            if fault.step == self._step or (fault.action == "slow" and fault.step < self._step):
                self._carry_out(fault)

    def _carry_out(self, fault: Fault) -> None:
        match fault.action:
            case "raise":
                raise InjectedFaultError(f"step {self._step}, because TOKEND_FAULTS says so")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    self._sleep(3600.0)
            case "slow":
                self._sleep(SLOW_SECONDS)
            case "nan":
                self.breaks_numbers = True
