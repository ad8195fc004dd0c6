"""The phases of a reload.

    PreparingModel        the model is prepared again (its files may have changed), or another one;
                          then until no process is being restarted
    ConnectingFrontEnds   front ends load the new model and connect to the new engine
        side by side: the new engine starts meanwhile
            DrainingOldEngine    new requests go to the new engine, open ones finish at the old one
            StoppingGeneration   the old generation shuts down
        in place:
            StoppingGeneration   the old generation shuts down, requests wait in the front ends
            StartingNewEngine    the new engine starts and gets all open requests

Every method that handles an event returns the phase that follows. After a failure before the switch
the old generation continues or, in place, is started again.
"""

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from deploy.models.store import note_start
from deploy.supervisor import exit_report
from deploy.supervisor.epochs import EpochCounter, ServedModels
from deploy.supervisor.processes import Child, ChildProcesses, StartError
from deploy.supervisor.recovery import Recovery
from deploy.supervisor.reload.actions import ReloadActions
from deploy.supervisor.shutdown import AFTER_FAILURE, ON_REQUEST, ShutdownLimits, ShutdownSequence
from proto.codec import Message
from proto.errors import ModelError
from proto.messages.lifecycle import (
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
from proto.messages.lora import AdapterList

CONNECT_SECONDS: Final = 600.0
"""Limit for the new generation to load and to be connected to every front end."""


@dataclass(frozen=True)
class ReloadOutcome:
    """End of a reload. error: "" for success. retry: whether to try again."""

    error: str = ""
    retry: bool = False


@dataclass
class ReloadContext:
    """The parts of the supervisor that the phases use.

    clock: monotonic seconds.
    outcomes: each reload appends one, not always in its last phase; `Reload` removes it.
    """

    epochs: EpochCounter
    recovery: Recovery
    children: ChildProcesses
    actions: ReloadActions
    strategy: str
    num_front_ends: int
    clock: Callable[[], float] = time.monotonic
    outcomes: list[ReloadOutcome] = field(default_factory=list)

    def start(self, epochs: EpochCounter) -> None:
        """Start the engine and the workers of a generation."""
        for index in epochs.workers_of(0):
            self.children.start(epochs.make_boot("worker", index))
        self.children.start(epochs.make_boot("engine_core", 0))

    def conclude(self, error: str = "", *, retry: bool = False) -> None:
        self.outcomes.append(ReloadOutcome(error, retry))


class ReloadPhase:
    """Base class of the phases; its methods do nothing."""

    idle = False

    def __init__(self, context: ReloadContext) -> None:
        self._context = context

    def advance(self) -> "ReloadPhase":
        """Do what is due; called in every loop of the supervisor."""
        return self

    def seconds_to_next_step(self) -> float | None:
        """Seconds until something is due without an event; None for never."""
        return None

    def note_message(self, message: Message) -> "ReloadPhase":
        """Handle a message of a process."""
        return self

    def handles_death_of(self, dead: Child) -> bool:
        """Whether the reload, and not `Recovery`, handles the death of this process."""
        return False

    def is_stopping(self, process: Child) -> bool:
        """Whether the process was asked to exit."""
        return False

    def disconnect(self, hung: Child) -> "ReloadPhase":
        """Disconnect the others from a process that will be killed."""
        return self

    def note_death(self, dead: Child) -> "ReloadPhase":
        """Handle the death of any process."""
        return self

    def cancel(self, reason: str) -> "ReloadPhase":
        """Cancel the reload, because the daemon shuts down; open requests still finish."""
        return self


class IdlePhase(ReloadPhase):
    """No reload is in progress."""

    idle = True


class PreparingModel(ReloadPhase):
    """Prepares the model again, because its files may have changed, or another one.

    Then waits until all restarts are complete.
    model: the other one; None for the one that is served.
    """

    def __init__(self, context: ReloadContext, model: str | None) -> None:
        super().__init__(context)
        self._preparation = context.actions.start_preparation(model)
        self._models: ServedModels | None = None

    def advance(self) -> ReloadPhase:
        context = self._context
        if self._models is None:
            if not self._preparation.has_ended():
                return self
            try:
                models = self._preparation.result()
                context.actions.check_model(context.epochs.models.model, models.model)
            except ModelError as error:
                return self.cancel(str(error))
            context.actions.end_preparation(self._preparation)
            self._models = models
        if context.recovery.has_outages:
            return self
        note_start(*self._models)
        in_place = not self._run_side_by_side(self._models)
        return ConnectingFrontEnds(context, self._models, in_place=in_place).begin()

    def _run_side_by_side(self, models: ServedModels) -> bool:
        """Whether both engines run at once; never with a frozen one, which finishes nothing."""
        context = self._context
        if context.epochs.pause_mode == "freeze":
            return False
        old = context.epochs.models.model
        return context.strategy == "side-by-side" or (
            context.strategy == "auto" and context.actions.two_generations_fit(old, models.model)
        )

    def cancel(self, reason: str) -> ReloadPhase:
        if self._models is None:
            self._context.actions.end_preparation(self._preparation)
        self._context.conclude(reason)
        return IdlePhase(self._context)


class ConnectingFrontEnds(ReloadPhase):
    """Front ends get ready for the new generation, which starts meanwhile if side by side."""

    def __init__(self, context: ReloadContext, models: ServedModels, *, in_place: bool) -> None:
        super().__init__(context)
        self._in_place = in_place
        self._epochs = context.epochs.next_generation(models)
        self._missing = set(range(context.num_front_ends))
        self._deadline = context.clock() + CONNECT_SECONDS

    def begin(self) -> ReloadPhase:
        epochs = self._epochs
        try:
            if not self._in_place:
                self._context.start(epochs)
        except StartError as error:
            return self.cancel(str(error))
        self._context.children.send_to_front_ends(
            NextEngine(epochs.epoch, epochs.models.model, self._in_place)
        )
        return self

    def advance(self) -> ReloadPhase:
        if not self._missing and not self._context.recovery.has_outages:
            return self._switch()
        if self._context.clock() < self._deadline:
            return self
        return self.cancel(f"it was not ready after {CONNECT_SECONDS:g} s")

    def seconds_to_next_step(self) -> float | None:
        return max(0.0, self._deadline - self._context.clock())

    def note_message(self, message: Message) -> ReloadPhase:
        if _is_violation(message, self._epochs):
            return self.cancel("one of its processes sent an invalid message")
        if isinstance(message, Paused) and message.mode != self._epochs.pause_mode:
            # the new engine was started with another pause mode
            return self._stop("the engine was paused or resumed meanwhile", retry=True)
        if isinstance(message, AdapterList):
            return self._note_adapters(message)
        if not isinstance(message, NextReady) or message.epoch != self._epochs.epoch:
            return self
        if message.error is not None:
            return self.cancel(exit_report.user_error(message.error) or message.error.message)
        self._missing.discard(message.index)
        return self

    def _note_adapters(self, message: AdapterList) -> ReloadPhase:
        """Note adapters that the new engine loads at its start, or that the old one has now."""
        if message.epoch >= self._epochs.generation:
            self._epochs.note_adapters(message)
        elif not self._is_other_model:
            if not self._in_place:  # the new engine was started with others
                return self._stop("adapters were loaded or unloaded meanwhile", retry=True)
            self._epochs.adopt_adapters(message)
        return self

    @property
    def _is_other_model(self) -> bool:
        old, new = self._context.epochs.models.model, self._epochs.models.model
        return old.source != new.source

    def handles_death_of(self, dead: Child) -> bool:
        return _is_of_generation(dead, self._epochs)

    def note_death(self, dead: Child) -> ReloadPhase:
        if self.handles_death_of(dead):
            return self.cancel(describe_death(dead))
        return self._stop(f"{dead.name} died meanwhile", retry=True)

    def cancel(self, reason: str) -> ReloadPhase:
        return self._stop(reason, retry=False)

    def _stop(self, reason: str, *, retry: bool) -> ReloadPhase:
        self._context.children.send_to_front_ends(DropEngine(self._epochs.epoch))
        self._context.conclude(reason, retry=retry)
        return StoppingGeneration(self._context, self._epochs, AFTER_FAILURE)

    def _switch(self) -> ReloadPhase:
        epochs, children = self._context.epochs, self._context.children
        old = epochs.snapshot()
        epochs.switch_to(self._epochs)
        if self._in_place:
            children.send_to_front_ends(NewEngine(epochs.epoch, epochs.worker_epoch, died=False))
            successor = StartingNewEngine(self._context, old.models)
            return StoppingGeneration(self._context, old, ON_REQUEST, successor)
        children.send_to_front_ends(SwitchEngine(epochs.epoch))
        return DrainingOldEngine(self._context, old)


class DrainingOldEngine(ReloadPhase):
    """The old generation finishes its requests beside the new one.

    The reload is complete as soon as every front end uses the new one.
    """

    def __init__(self, context: ReloadContext, old: EpochCounter) -> None:
        super().__init__(context)
        self._old = old
        self._epoch = context.epochs.epoch
        self._switching = set(range(context.num_front_ends))
        self._missing = set(self._switching)

    def note_message(self, message: Message) -> ReloadPhase:
        if isinstance(message, Switched) and message.epoch == self._epoch:
            self._note_switched(message.index)
        elif isinstance(message, OldEngineIdle) and message.epoch == self._old.epoch:
            return self._note_idle(message.index)
        elif _is_violation(message, self._old):
            return self._abandon()
        elif isinstance(message, Paused):
            _pause_both_engines(self._context, self._old, message)
        elif isinstance(message, AdapterList) and message.epoch < self._epoch:
            self._pass_on_adapters(message)
        return self

    def _pass_on_adapters(self, message: AdapterList) -> None:
        """Give the new engine the adapters of the old one, which a front end has called late."""
        epochs = self._context.epochs
        if self._old.models.model.source == epochs.models.model.source:
            epochs.adopt_adapters(message)
            whole = AdapterList(message.epoch, list((epochs.adapters or {}).values()))
            for child in self._context.children.of_generation(epochs.generation):
                if child.role == "engine_core":
                    child.send(whole)

    def handles_death_of(self, dead: Child) -> bool:
        return _is_of_generation(dead, self._old)

    def disconnect(self, hung: Child) -> ReloadPhase:
        return self._abandon() if self.handles_death_of(hung) else self

    def note_death(self, dead: Child) -> ReloadPhase:
        """Abandon the old generation if it died; the requests of a dead front end are gone."""
        if self.handles_death_of(dead):
            return self._abandon()
        return self._note_idle(dead.index) if dead.role == "api_server" else self

    def _abandon(self) -> ReloadPhase:
        """End the old generation; its requests continue at the current engine."""
        self._context.children.send_to_front_ends(DropEngine(self._old.epoch))
        for index in list(self._switching):
            self._note_switched(index)  # it has switched before it receives DropEngine
        return StoppingGeneration(self._context, self._old, AFTER_FAILURE)

    def _note_switched(self, index: int) -> None:
        if index in self._switching:
            self._switching.remove(index)
            if not self._switching:
                self._context.conclude()

    def _note_idle(self, index: int) -> ReloadPhase:
        self._note_switched(index)
        self._missing.discard(index)
        return self if self._missing else StoppingGeneration(self._context, self._old, ON_REQUEST)


class StoppingGeneration(ReloadPhase):
    """An unused generation shuts down.

    successor: in place, the phase in which the current generation, which is started after that,
        loads, while requests wait in the front ends; None if the current generation runs.
    """

    def __init__(
        self,
        context: ReloadContext,
        epochs: EpochCounter,
        limits: ShutdownLimits,
        successor: ReloadPhase | None = None,
    ) -> None:
        super().__init__(context)
        self._epochs = epochs
        self._successor = successor
        self._shutdown = ShutdownSequence(
            context.children.of_generation(epochs.generation), limits, context.clock
        )

    def advance(self) -> ReloadPhase:
        self._shutdown.send_due_signals()
        if self._context.children.of_generation(self._epochs.generation):
            return self
        self._epochs.remove_sockets(self._epochs.epoch)
        self._epochs.remove_sockets(self._epochs.worker_epoch)
        if self._successor is None:
            return IdlePhase(self._context)
        self._context.start(self._context.epochs)
        return self._successor

    def note_message(self, message: Message) -> ReloadPhase:
        if isinstance(message, Paused):
            _pause_both_engines(self._context, self._epochs, message)
        return self

    def seconds_to_next_step(self) -> float | None:
        return self._shutdown.seconds_to_next_signal()

    def handles_death_of(self, dead: Child) -> bool:
        return _is_of_generation(dead, self._epochs)

    def is_stopping(self, process: Child) -> bool:
        return self.handles_death_of(process)


class StartingNewEngine(ReloadPhase):
    """In place: the new generation loads. If it fails, one with the old `models` is started."""

    def __init__(self, context: ReloadContext, models: ServedModels) -> None:
        super().__init__(context)
        self._models = models

    def note_message(self, message: Message) -> ReloadPhase:
        epochs = self._context.epochs
        if not isinstance(message, EngineReady) or message.epoch != epochs.epoch:
            return self
        self._context.children.send_to_front_ends(SwitchEngine(epochs.epoch))
        self._context.conclude()
        return IdlePhase(self._context)

    def handles_death_of(self, dead: Child) -> bool:
        return _is_of_generation(dead, self._context.epochs)

    def note_death(self, dead: Child) -> ReloadPhase:
        if not self.handles_death_of(dead):
            return self
        epochs, children = self._context.epochs, self._context.children
        failed = epochs.snapshot()
        self._context.conclude(describe_death(dead))
        children.send_to_front_ends(DropEngine(failed.epoch))
        epochs.switch_to(epochs.next_generation(self._models))
        children.send_to_front_ends(NewEngine(epochs.epoch, epochs.worker_epoch, died=False))
        return StoppingGeneration(self._context, failed, ON_REQUEST, IdlePhase(self._context))


def _pause_both_engines(context: ReloadContext, other: EpochCounter, message: Paused) -> None:
    """Apply a pause or resume to both engines, whichever engine got the admin call.

    That is the old one if the front end had not switched yet, or if the message was in transit
    when it did:

        operator ─▶ front end ─▶ engine 1 ─ Paused ──────────────┐
        supervisor ──── SwitchEngine(2) ─────────────────────────┴─▶ engine 2 gets it, too

    Both engines get all of these messages in the same order, so they end in the same state.
    """
    context.epochs.pause_mode = message.mode
    for generation in (other.generation, context.epochs.generation):
        for child in context.children.of_generation(generation):
            if child.role == "engine_core":
                child.send(message)


def _is_of_generation(process: Child, epochs: EpochCounter) -> bool:
    """Whether this is the engine or a worker of a generation; front ends belong to none."""
    return process.role != "api_server" and process.generation == epochs.generation


def _is_violation(message: Message, epochs: EpochCounter) -> bool:
    """Whether a message reports a protocol violation by a process of this generation."""
    if not isinstance(message, ProtocolViolation):
        return False
    return message.epoch == (epochs.worker_epoch if message.role == "worker" else epochs.epoch)


def describe_death(dead: Child) -> str:
    """Describe for the user why a process could not start."""
    message = exit_report.user_error(dead.fatal_error)
    if message is not None:
        return message
    lines = [f"{dead.name} (pid {dead.pid}) {exit_report.describe_exit(dead)}"]
    if dead.fatal_error is not None:
        lines.append(textwrap.indent(dead.fatal_error.traceback.rstrip(), "  "))
    return "\n".join(lines)
