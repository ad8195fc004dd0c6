"""What a reload goes through, phase by phase.

                         ┌ side by side ─ it starts, front ends meet it ─ switch ─▶ leaving: the
    preparing ─▶ meeting ┤                                               old one's requests end
    (the model           └ in place ─ front ends read the model ─▶ clearing: the old one ends
     once more)                    ─▶ starting: front ends send it what is open ─ switch

Each phase says which one follows. Until the switch nothing is lost when something fails: the
old generation goes on, or in place is started again. Processes are reached by `ProcessActions`
only.
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
    EngineLeft,
    EngineReady,
    NewEngine,
    NextEngine,
    NextReady,
    Paused,
    ProtocolViolation,
    Switched,
    SwitchEngine,
)
from proto.prepared_model import PreparedModel

MEETING_SECONDS: Final = 600.0
"""For another generation to load and to be met by every front end."""


@dataclass(frozen=True)
class ReloadContext:
    """What all phases touch.

    num_front_ends, num_workers: of a generation. clock: monotonic seconds.
    conclude: called once in each reload: why the old generation goes on, or "", and whether
    to try again.
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
        """Start engine and workers."""
        for rank in range(self.num_workers):
            self.actions.start(epochs.boot("worker", rank))
        self.actions.start(epochs.boot("engine_core", 0))


class Phase:
    """Nothing is under way; and what the phases have in common."""

    idle = False

    def __init__(self, context: ReloadContext) -> None:
        self._context = context

    def press(self) -> "Phase":
        """The loop has turned."""
        return self

    def seconds_left(self) -> float | None:
        """How long nothing is to do though nothing happens; None for ever."""
        return None

    def note(self, message: Message) -> "Phase":
        """A process said something."""
        return self

    def owns(self, dead: Child) -> bool:
        """Whether this death is the affair of the reload, and of nobody else."""
        return False

    def is_ending(self, process: Child) -> bool:
        """It was asked to end."""
        return False

    def cut_off(self, hung: Child) -> "Phase":
        """It will be killed; what it says until then is to reach nobody."""
        return self

    def note_death(self, dead: Child) -> "Phase":
        """Of any process."""
        return self

    def give_up(self, why: str) -> "Phase":
        """The daemon is about to end: do nothing that is not needed for the requests there are."""
        return self


class Idle(Phase):
    """There is one generation."""

    idle = True


class Preparing(Phase):
    """The files of the model may have changed."""

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
    """Nobody is to be missing when another generation comes."""

    def __init__(self, context: ReloadContext, model: PreparedModel) -> None:
        super().__init__(context)
        self._model = model

    def press(self) -> Phase:
        if self._context.recovery.has_gaps:
            return self
        return Meeting(self._context, self._model, in_place=not self._side_by_side()).begin()

    def _side_by_side(self) -> bool:
        """Not beside a frozen engine, which would never finish what it has."""
        if self._context.epochs.pause_mode == "freeze":
            return False
        strategy = self._context.strategy
        return strategy == "side-by-side" or (strategy == "auto" and self._context.actions.fits())

    def give_up(self, why: str) -> Phase:
        self._context.conclude(why, False)
        return Idle(self._context)


class Meeting(Phase):
    """Front ends get ready for another generation; side by side that one starts meanwhile."""

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
            return self.give_up("one of its processes is not to be trusted")
        if isinstance(message, Paused) and message.mode != self._epochs.pause_mode:
            # who is born knows of another pause, or of none
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
    """The old generation computes what it has begun, beside the one of now.

    The reload is over as soon as every front end asks the new one.
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
        elif isinstance(message, EngineLeft) and message.epoch == self._old.epoch:
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
        """With a front end go its requests."""
        if self.owns(dead):
            return self._abandon()
        return self._left(dead.index) if dead.role == "api_server" else self

    def _abandon(self) -> Phase:
        """The old generation is of no use any more: its requests go on at the engine of now."""
        self._context.actions.tell_front_ends(DropEngine(self._old.epoch))
        for index in list(self._switching):
            self._switched(index)  # it will have, before it hears of that
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
    """A generation that nobody asks any more ends."""

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
    """In place: what was makes room; meanwhile requests wait in the front ends.

    restores: what comes is what was there before.
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
    """In place: the new generation loads. If it cannot, that of `model` comes back."""

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
    """Who pauses the daemon means all that is computed, whichever engine was asked.

    That was the one of before where a front end had not switched yet, or where its word was
    still on its way here when the others did:

        operator ─▶ front end ─▶ engine 1 ─ Paused ──────────────┐
        supervisor ──── SwitchEngine(2) ─────────────────────────┴─▶ engine 2 hears of it now

    Each engine hears all of it in the order in which it was heard here, so they end up alike.
    """
    context.epochs.pause_mode = message.mode
    for generation in (beside.generation, context.epochs.generation):
        for each in context.actions.members(generation):
            if each.role == "engine_core":
                each.tell(message)


def _is_violation(message: Message, epochs: EpochCounter) -> bool:
    """Somebody has said what it cannot mean, and belongs to these."""
    if not isinstance(message, ProtocolViolation):
        return False
    return message.epoch == (epochs.worker_epoch if message.role == "worker" else epochs.epoch)


def describe_death(dead: Child) -> str:
    """What the user should know of a process that could not start."""
    message = exit_report.user_error(dead.last_words)
    if message is not None:
        return message
    lines = [f"{dead.name} (pid {dead.pid}) {exit_report.manner(dead)}"]
    if dead.last_words is not None:
        lines.append(textwrap.indent(dead.last_words.traceback.rstrip(), "  "))
    return "\n".join(lines)
