"""Who the engine client tells of the engine: those who watch it, or nobody."""

from typing import Final, Protocol

from proto.lifecycle import EngineReady
from proto.view import EngineView


class Audience(Protocol):
    """Of one front end."""

    @property
    def watches(self) -> bool:
        """Somebody is there."""
        ...

    def meet(self, engine: EngineReady) -> None:
        """This is the engine of now."""
        ...

    def show(self, view: EngineView) -> None:
        """It has told this of itself."""
        ...

    def dismiss(self) -> None:
        """There is nothing more to see."""
        ...


class NoAudience:
    """Nobody may watch."""

    watches: bool = False

    def meet(self, engine: EngineReady) -> None: ...

    def show(self, view: EngineView) -> None: ...

    def dismiss(self) -> None: ...


NO_AUDIENCE: Final = NoAudience()
