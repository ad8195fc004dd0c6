"""The phases of a reload.

                         ┌ side by side ─ new engine starts ─ switch ─▶ leaving: open requests
    preparing ─▶ meeting ┤                                              finish at the old engine
    (the model again)    └ in place ─▶ clearing: the old engine ends ─▶ starting: the new engine
                                                     gets all open requests ─ switch

Each phase returns its successor. A failure before the switch loses nothing: the old generation
goes on, or, in place, is started again.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from deploy.reload.actions import ProcessActions
from deploy.supervisor import exit_report
from deploy.supervisor.epochs import EpochCounter
from deploy.supervisor.processes import Child
from deploy.supervisor.recovery import Recovery
from deploy.supervisor.shutdown import AFTER_A_DEATH, ON_REQUEST, Ending, ShutdownLimits
from proto.codec import Message
from proto.errors import ModelError
from proto.lifecycle import (
    DropEngine,
    EngineReady,
    NewEngine,
    NextEngine,
    NextReady,
    OldEngineIdle,
    Paused,
    ProtocolViolation,
    Switched,
    SwitchEngine,
)
from proto.prepared_model import PreparedModel

MEETING_SECONDS: Final = 600.0
"""Limit for the new generation to load and to be connected to every API server."""


@dataclass(frozen=True)
class ReloadContext:
    """What all phases use.

    num_workers: of a generation. clock: monotonic seconds.
    conclude: called once per reload with the error ("" for success) and whether to try again.
    """

    epochs: EpochCounter
    recovery: Recovery
    actions: ProcessActions
    strategy: str
    num_front_ends: int
    num_workers: int
    clock: Callable[[], float]
    conclude: Callable[[str, bool], None]

    def start(self, epochs: EpochCounter) -> None:
        """Start the engine and the workers of a generation."""
        for rank in range(self.num_workers):
            self.actions.start(epochs.boot("worker", rank))
        self.actions.start(epochs.boot("engine_core", 0))


class Phase:
    """Base class of the phases; its methods do nothing."""

    idle = False

    def __init__(self, context: ReloadContext) -> None:
        self._context = context

    def press(self) -> "Phase":
        """Do what is due; called in every loop of the supervisor."""
        return self

    def seconds_left(self) -> float | None:
        """Seconds until something is due without an event; None for never."""
        return None

    def note(self, message: Message) -> "Phase":
        """Take a message of a process into account."""
        return self

    def owns(self, dead: Child) -> bool:
        """Whether the reload, and not recovery, handles the death of this process."""
        return False

    def is_ending(self, process: Child) -> bool:
        """Whether the process was asked to exit."""
        return False

    def cut_off(self, hung: Child) -> "Phase":
        """Disconnect the others from a process that will be killed."""
        return self

    def note_death(self, dead: Child) -> "Phase":
        """Take the death of any process into account."""
        return self

    def give_up(self, why: str) -> "Phase":
        """Cancel what open requests do not need, because the daemon shuts down."""
        return self


class Idle(Phase):
    """No reload is in progress."""

    idle = True


class Preparing(Phase):
    """Prepares the model again, because its files may have changed."""

    def __init__(self, context: ReloadContext) -> None:
        super().__init__(context)
        self._preparation = context.actions.prepare()

    def press(self) -> Phase:
        if not self._preparation.has_ended():
            return self
        try:
            model = self._preparation.result()
        except ModelError as error:
            return self.give_up(str(error))
        self._context.actions.let_go(self._preparation)
        return Waiting(self._context, model).press()

    def give_up(self, why: str) -> Phase:
        self._context.actions.let_go(self._preparation)
        self._context.conclude(why, False)
        return Idle(self._context)


class Waiting(Phase):
    """Waits until all restarts are complete."""

    def __init__(self, context: ReloadContext, model: PreparedModel) -> None:
        super().__init__(context)
        self._model = model

    def press(self) -> Phase:
        if self._context.recovery.has_gaps:
            return self
        return Meeting(self._context, self._model, in_place=not self._side_by_side()).begin()

    def _side_by_side(self) -> bool:
        """Whether both engines run at once; never with a frozen one, which finishes nothing."""
        if self._context.epochs.pause_mode == "freeze":
            return False
        strategy = self._context.strategy
        return strategy == "side-by-side" or (strategy == "auto" and self._context.actions.fits())

    def give_up(self, why: str) -> Phase:
        self._context.conclude(why, False)
        return Idle(self._context)


class Meeting(Phase):
    """API servers get ready for the new generation, which starts meanwhile if side by side."""

    def __init__(self, context: ReloadContext, model: PreparedModel, *, in_place: bool) -> None:
        super().__init__(context)
        self._in_place = in_place
        self._epochs = context.epochs.sibling(model)
        self._missing = set(range(context.num_front_ends))
        self._deadline = context.clock() + MEETING_SECONDS

    def begin(self) -> Phase:
        epochs = self._epochs
        try:
            if not self._in_place:
                self._context.start(epochs)
        except OSError as error:
            return self.give_up(f"no process could be started: {error.strerror}")
        self._context.actions.tell_front_ends(
            NextEngine(epochs.epoch, epochs.model, self._in_place)
        )
        return self

    def press(self) -> Phase:
        if not self._missing and not self._context.recovery.has_gaps:
            return self._switch()
        if self._context.clock() < self._deadline:
            return self
        return self.give_up(f"it was not ready after {MEETING_SECONDS:g} s")

    def seconds_left(self) -> float | None:
        return max(0.0, self._deadline - self._context.clock())

    def note(self, message: Message) -> Phase:
        if _is_violation(message, self._epochs):
            return self.give_up("one of its processes sent an invalid message")
        if isinstance(message, Paused) and message.mode != self._epochs.pause_mode:
            # the new engine was started with another pause mode
            return self._stop("the engine was paused or resumed meanwhile", again=True)
        if not isinstance(message, NextReady) or message.epoch != self._epochs.epoch:
            return self
        if message.error is not None:
            return self.give_up(exit_report.user_error(message.error) or message.error.message)
        self._missing.discard(message.index)
        return self

    def owns(self, dead: Child) -> bool:
        return dead.role != "api_server" and dead.generation == self._epochs.generation

    def note_death(self, dead: Child) -> Phase:
        if self.owns(dead):
            return self.give_up(describe_death(dead))
        return self._stop(f"{dead.name} died meanwhile", again=True)

    def give_up(self, why: str) -> Phase:
        return self._stop(why, again=False)

    def _stop(self, why: str, *, again: bool) -> Phase:
        self._context.actions.tell_front_ends(DropEngine(self._epochs.epoch))
        self._context.conclude(why, again)
        return Parting(self._context, self._epochs, AFTER_A_DEATH)

    def _switch(self) -> Phase:
        epochs, actions = self._context.epochs, self._context.actions
        old = epochs.as_it_is()
        epochs.adopt(self._epochs)
        if self._in_place:
            actions.tell_front_ends(NewEngine(epochs.epoch, epochs.worker_epoch, died=False))
            return Clearing(self._context, old, restores=False)
        actions.tell_front_ends(SwitchEngine(epochs.epoch))
        return Leaving(self._context, old)


class Leaving(Phase):
    """The old generation finishes its requests beside the new one.

    The reload is complete as soon as every API server uses the new one.
    """

    def __init__(self, context: ReloadContext, old: EpochCounter) -> None:
        super().__init__(context)
        self._old = old
        self._epoch = context.epochs.epoch
        self._switching = set(range(context.num_front_ends))
        self._missing = set(self._switching)

    def note(self, message: Message) -> Phase:
        if isinstance(message, Switched) and message.epoch == self._epoch:
            self._switched(message.index)
        elif isinstance(message, OldEngineIdle) and message.epoch == self._old.epoch:
            return self._left(message.index)
        elif _is_violation(message, self._old):
            return self._abandon()
        elif isinstance(message, Paused):
            _pause_all(self._context, self._old, message)
        return self

    def owns(self, dead: Child) -> bool:
        return dead.role != "api_server" and dead.generation == self._old.generation

    def cut_off(self, hung: Child) -> Phase:
        return self._abandon() if self.owns(hung) else self

    def note_death(self, dead: Child) -> Phase:
        """Abandon the old generation if it died; the requests of a dead API server are gone."""
        if self.owns(dead):
            return self._abandon()
        return self._left(dead.index) if dead.role == "api_server" else self

    def _abandon(self) -> Phase:
        """End the old generation; its requests continue at the current engine."""
        self._context.actions.tell_front_ends(DropEngine(self._old.epoch))
        for index in list(self._switching):
            self._switched(index)  # it has switched before it receives DropEngine
        return Parting(self._context, self._old, AFTER_A_DEATH)

    def _switched(self, index: int) -> None:
        if index in self._switching:
            self._switching.remove(index)
            if not self._switching:
                self._context.conclude("", False)

    def _left(self, index: int) -> Phase:
        self._switched(index)
        self._missing.discard(index)
        return self if self._missing else Parting(self._context, self._old, ON_REQUEST)


class Parting(Phase):
    """An unused generation shuts down."""

    def __init__(
        self, context: ReloadContext, epochs: EpochCounter, limits: ShutdownLimits
    ) -> None:
        super().__init__(context)
        self._epochs = epochs
        self._ending = Ending(context.actions.members(epochs.generation), limits, context.clock)

    def press(self) -> Phase:
        self._ending.press()
        if self._context.actions.members(self._epochs.generation):
            return self
        self._epochs.remove_sockets(self._epochs.epoch)
        self._epochs.remove_sockets(self._epochs.worker_epoch)
        return self._after()

    def note(self, message: Message) -> Phase:
        if isinstance(message, Paused):
            _pause_all(self._context, self._epochs, message)
        return self

    def seconds_left(self) -> float | None:
        return self._ending.seconds_to_next_step()

    def owns(self, dead: Child) -> bool:
        return dead.role != "api_server" and dead.generation == self._epochs.generation

    def is_ending(self, process: Child) -> bool:
        return self.owns(process)

    def _after(self) -> Phase:
        return Idle(self._context)


class Clearing(Parting):
    """In place: the old generation shuts down while requests wait in the API servers.

    restores: whether the generation that follows restores the old model.
    """

    def __init__(self, context: ReloadContext, old: EpochCounter, *, restores: bool) -> None:
        super().__init__(context, old, ON_REQUEST)
        self._restores = restores

    def _after(self) -> Phase:
        self._context.start(self._context.epochs)
        return (
            Idle(self._context) if self._restores else Starting(self._context, self._epochs.model)
        )


class Starting(Phase):
    """In place: the new generation loads. If it fails, one with the old `model` is started."""

    def __init__(self, context: ReloadContext, model: PreparedModel) -> None:
        super().__init__(context)
        self._model = model

    def note(self, message: Message) -> Phase:
        epochs = self._context.epochs
        if not isinstance(message, EngineReady) or message.epoch != epochs.epoch:
            return self
        self._context.actions.tell_front_ends(SwitchEngine(epochs.epoch))
        self._context.conclude("", False)
        return Idle(self._context)

    def owns(self, dead: Child) -> bool:
        return dead.role != "api_server" and dead.generation == self._context.epochs.generation

    def note_death(self, dead: Child) -> Phase:
        if not self.owns(dead):
            return self
        epochs, actions = self._context.epochs, self._context.actions
        failed = epochs.as_it_is()
        self._context.conclude(describe_death(dead), False)
        actions.tell_front_ends(DropEngine(failed.epoch))
        epochs.adopt(epochs.sibling(self._model))
        actions.tell_front_ends(NewEngine(epochs.epoch, epochs.worker_epoch, died=False))
        return Clearing(self._context, failed, restores=True)


def _pause_all(context: ReloadContext, beside: EpochCounter, message: Paused) -> None:
    """Apply a pause or resume to both engines, whichever engine got the admin call.

    That is the old one if the API server had not switched yet, or if the message was in transit
    when it did:

        operator ─▶ front end ─▶ engine 1 ─ Paused ──────────────┐
        supervisor ──── SwitchEngine(2) ─────────────────────────┴─▶ engine 2 hears of it now

    Both engines get all of these messages in the same order, so they end in the same state.
    """
    context.epochs.pause_mode = message.mode
    for generation in (beside.generation, context.epochs.generation):
        for each in context.actions.members(generation):
            if each.role == "engine_core":
                each.tell(message)


def _is_violation(message: Message, epochs: EpochCounter) -> bool:
    """Whether a message reports a protocol violation by a process of this generation."""
    if not isinstance(message, ProtocolViolation):
        return False
    return message.epoch == (epochs.worker_epoch if message.role == "worker" else epochs.epoch)


def describe_death(dead: Child) -> str:
    """Describe for the user why a process could not start."""
    message = exit_report.user_error(dead.last_words)
    if message is not None:
        return message
    lines = [f"{dead.name} (pid {dead.pid}) {exit_report.manner(dead)}"]
    if dead.last_words is not None:
        lines.append(textwrap.indent(dead.last_words.traceback.rstrip(), "  "))
    return "\n".join(lines)
