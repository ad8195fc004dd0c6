"""A reload: another engine and other workers, beside those of now or in their place."""

import msgspec

from proto.errors import ErrorInfo
from proto.prepared_model import PreparedModel


class NextEngine(msgspec.Struct, array_like=True, tag=43, frozen=True):
    """A reload: get ready for another engine, and for another version of the model.

    in_place: it comes when the one of now is gone, and takes its requests over.
    """

    epoch: int
    model: PreparedModel
    in_place: bool


class NextReady(msgspec.Struct, array_like=True, tag=44, frozen=True):
    """A front end is ready for that engine, and that engine for it; or not, and why."""

    index: int
    epoch: int
    error: ErrorInfo | None = None


class SwitchEngine(msgspec.Struct, array_like=True, tag=45, frozen=True):
    """Ask that engine from now on; what is open stays with the one before, if that goes on."""

    epoch: int


class Switched(msgspec.Struct, array_like=True, tag=48, frozen=True):
    """A front end asks that engine: whoever comes from now on is answered by it."""

    index: int
    epoch: int


class EngineLeft(msgspec.Struct, array_like=True, tag=46, frozen=True):
    """A front end has nothing open any more at the engine of before."""

    index: int
    epoch: int


class DropEngine(msgspec.Struct, array_like=True, tag=47, frozen=True):
    """An engine beside that of now is gone: one that was to come, or one that was to be left.

    What is open there goes to the engine of now.
    """

    epoch: int


class ReloadState(msgspec.Struct, frozen=True):
    """A file in the run directory, for `tokend reload`. pid: of the supervisor.

    count: reloads that are over. under_way: one is, or is wanted. problem: of the last one.
    """

    pid: int
    count: int = 0
    under_way: bool = False
    problem: str = ""
