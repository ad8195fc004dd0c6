"""The phases of `make gpu-check`: what each is called, how long it may take, what it needs.

Their limits add up to no more than the limit of all, so none is cut short by another.
"""

from typing import Final, NamedTuple

TOTAL_SECONDS: Final = 480.0


class Phase(NamedTuple):
    """function: "module:function" of tests.gpu, which returns figures and raises where a
    condition does not hold. seconds: after which its process is ended."""

    name: str
    function: str
    seconds: float


PHASES: Final = (
    Phase("versions", "basics:versions", 20.0),
    Phase("ceilings", "basics:ceilings", 20.0),
    Phase("attention", "kernels:attention", 75.0),
    Phase("sampling", "kernels:sampling", 35.0),
    Phase("parity", "models:parity", 35.0),
    Phase("decode 1B", "models:decode_1b", 30.0),
    Phase("decode 8B", "models:decode_8b", 50.0),
    Phase("prefill 8B", "models:prefill_8b", 35.0),
    Phase("steps 8B", "serving:steps_8b", 40.0),
    Phase("daemon 8B", "server:daemon_8b", 85.0),
    Phase("transformers 8B", "serving:transformers_8b", 55.0),
)


class Failed(Exception):
    """A condition of a phase does not hold; the message has the numbers."""


def demand(holds: bool, what: str) -> None:
    """Raise Failed with `what` unless it holds."""
    if not holds:
        raise Failed(what)
