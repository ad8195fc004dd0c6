"""What happens to processes: words for the operator, who takes whose place, and the end."""

import msgspec

from proto.engine_io import PauseMode
from proto.errors import ErrorInfo
from proto.lifecycle.roles import Role


class Progress(msgspec.Struct, array_like=True, tag=15, frozen=True):
    """A line for the terminal while something long runs. `fraction` is 0 to 1 or None."""

    role: Role
    index: int
    what: str
    fraction: float | None = None


class Notice(msgspec.Struct, array_like=True, tag=16, frozen=True):
    """One line that the operator should read."""

    role: Role
    index: int
    message: str


class Fatal(msgspec.Struct, array_like=True, tag=17, frozen=True):
    """Last words of a process that cannot go on."""

    role: Role
    index: int
    error: ErrorInfo


class Shutdown(msgspec.Struct, array_like=True, tag=18, frozen=True):
    """End now, in order. Sent by the supervisor."""


class NewEngine(msgspec.Struct, array_like=True, tag=19, frozen=True):
    """The engine died and another one starts: meet it at the paths of these epochs.

    A worker forgets rows and KV and keeps its weights. A front end sends what is open again.
    died: it did; or it ends in order and makes room, for a reload in place.
    """

    epoch: int
    worker_epoch: int
    died: bool = True


class NewWorkers(msgspec.Struct, array_like=True, tag=20, frozen=True):
    """A worker died, and with it all that were computed together: others start."""

    worker_epoch: int


class NewFrontEnd(msgspec.Struct, array_like=True, tag=21, frozen=True):
    """A front end died, its requests with it, and another one starts."""

    index: int
    incarnation: int


class Restarted(msgspec.Struct, array_like=True, tag=22, frozen=True):
    """For the statistics of the front ends: a process was started again.

    hung: it was ended by force, because it did not move any more.
    """

    role: Role
    hung: bool = False


class WorkersReady(msgspec.Struct, array_like=True, tag=24, frozen=True):
    """The workers of this epoch take steps."""

    worker_epoch: int


class Paused(msgspec.Struct, array_like=True, tag=25, frozen=True):
    """The engine is paused; None: no longer. For the engine that may follow.

    From the supervisor, to all engines that there are in a reload: be so, too.
    """

    mode: PauseMode | None


class Drain(msgspec.Struct, array_like=True, tag=40, frozen=True):
    """Let no more requests in, and tell of those that are under way (UnderWay)."""


class UnderWay(msgspec.Struct, array_like=True, tag=41, frozen=True):
    """HTTP requests that a draining front end still answers; comes at once, and with 0."""

    index: int
    num_requests: int


class AbortRequests(msgspec.Struct, array_like=True, tag=49, frozen=True):
    """End the HTTP requests whose answers have one of these ids, whichever front end has them.

    From the front end that an operator has asked to the supervisor, and from there to all.
    owner: name of the key that they must have come with; None for any.
    """

    request_ids: list[str]
    owner: str | None = None


class DrainWanted(msgspec.Struct, array_like=True, tag=42, frozen=True):
    """An operator has asked a front end that the daemon drains and ends."""

    index: int
