"""Whether processes still move, asked and told; and whom to end."""

from typing import Literal

import msgspec


class Heartbeat(msgspec.Struct, array_like=True, tag=23, frozen=True):
    """The engine has completed steps with the workers of this epoch. `step`: the last one."""

    worker_epoch: int
    step: int


class Ping(msgspec.Struct, array_like=True, tag=35, frozen=True):
    """Answer as soon as your loop comes to it. One is under way at a time."""


class Alive(msgspec.Struct, array_like=True, tag=36, frozen=True):
    """Answer to a Ping: the loop of this process turns."""


class EngineAlive(msgspec.Struct, array_like=True, tag=37, frozen=True):
    """An engine's answer to a Ping.

    num_steps: steps that all workers of this epoch have answered.
    awaits: ranks of workers that owe an answer, to a step, to what their start needs, or, where
        nobody can go on without it, about a copy of the KV connector.
    ready: the workers of this epoch take steps.
    has_work: there is something to schedule.
    num_reports: what workers of this epoch have said of such copies.
    """

    worker_epoch: int
    num_steps: int = 0
    awaits: tuple[int, ...] = ()
    ready: bool = False
    has_work: bool = False
    num_reports: int = 0


class AwaitsRanks(msgspec.Struct, array_like=True, tag=61, frozen=True):
    """A worker is in the middle of a step and has waited long for those that share its model.

    It hangs only if they all do.
    """

    rank: int


class NotReady(msgspec.Struct, array_like=True, frozen=True):
    """A reason not to send requests here. since: seconds of the monotonic clock."""

    what: str
    since: float


class Condition(msgspec.Struct, array_like=True, tag=38, frozen=True):
    """For the health of the front ends: all that is amiss now; replaces what was said before."""

    reasons: tuple[NotReady, ...] = ()


class FrontEndStalled(msgspec.Struct, array_like=True, tag=34, frozen=True):
    """This life of a front end does not read what the engine sends; the engine has given it up."""

    index: int
    incarnation: int


class Distrust(msgspec.Struct, array_like=True, tag=60, frozen=True):
    """Somebody said what it cannot mean, and nobody listens to it any more: end it.

    role: "worker" or "engine_core". epoch: the worker epoch of a worker, the engine's own of
    an engine; in another epoch the sender hears somebody else. reason: for the operator.
    """

    role: Literal["worker", "engine_core"]
    index: int
    epoch: int
    reason: str
