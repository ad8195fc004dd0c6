"""Fault injection for tests.

    TOKEND_FAULTS="worker:raise@20, engine:kill@50x2, worker1:slow@10"

    ROLE[INDEX]  worker, engine
    ACTION       raise   an exception
                 kill    SIGKILL to itself
                 hang    the step never ends
                 slow    this step and all later ones take a second longer
                 nan     the step's hidden states are NaN (workers only)
    @STEP        before this step with tokens, counted from 1 since the process started
    xCOUNT       also after restarts: in this many incarnations of the process (default 1)

The supervisor passes faults on only with --enable-fault-injection.
"""

import os
import re
import signal
import time
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from proto.errors import ConfigError

Action = Literal["raise", "kill", "hang", "slow", "nan"]
SLOW_SECONDS: Final = 1.0
_FORM: Final = re.compile(r"(worker|engine)(\d*):(raise|kill|hang|slow|nan)@(\d+)(?:x(\d+))?")


class InjectedFaultError(Exception):
    """Raised by the action "raise"."""


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """One fault to inject. role: "worker" or "engine_core".

    incarnations: the fault is injected in this many incarnations of the process.
    """

    role: str
    index: int
    action: Action
    step: int
    incarnations: int = 1


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse a value of TOKEND_FAULTS; raises ConfigError for an invalid fault."""
    return tuple(_parse(word.strip()) for word in text.split(",") if word.strip())


def _parse(word: str) -> Fault:
    found = _FORM.fullmatch(word)
    if found is None or (found[1] == "engine" and found[3] == "nan"):
        raise ConfigError(f"TOKEND_FAULTS: {word!r} is not a fault such as worker:raise@20")
    role = "engine_core" if found[1] == "engine" else "worker"
    action: Action = found[3]  # type: ignore[assignment]
    return Fault(role, int(found[2] or 0), action, int(found[4]), int(found[5] or 1))


class FaultInjector:
    """Injects the faults of one process.

    injects_nan: whether the hidden states of the present step are replaced by NaN.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults = tuple(faults)
        self._step = 0
        self.injects_nan = False

    @classmethod
    def of(
        cls, faults: Iterable[Fault], role: str, index: int, incarnation: int
    ) -> "FaultInjector":
        """Create an injector of the faults that apply to this incarnation of this process."""
        return cls(
            fault
            for fault in faults
            if (fault.role, fault.index) == (role, index) and incarnation < fault.incarnations
        )

    @property
    def idle(self) -> bool:
        """Whether there are no faults to inject."""
        return not self._faults

    def begin_step(self) -> None:
        """Inject the faults of the step that starts now; call it before each step with tokens."""
        self._step += 1
        self.injects_nan = False
        for fault in self._faults:
            if fault.step == self._step or (fault.action == "slow" and fault.step < self._step):
                self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        match fault.action:
            case "raise":
                raise InjectedFaultError(f"fault injected at step {self._step} by TOKEND_FAULTS")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(3600.0)
            case "slow":
                time.sleep(SLOW_SECONDS)
            case "nan":
                self.injects_nan = True
