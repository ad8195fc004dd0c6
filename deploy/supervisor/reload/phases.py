"""The phases of a reload.

    PreparingModel        the model is prepared again (its files may have changed), or another one
    AwaitingProcesses     until no process is being restarted
    ConnectingFrontEnds   front ends load the new model and connect to the new engine
        side by side: the new engine starts meanwhile
            DrainingOldEngine    new requests go to the new engine, open ones finish at the old one
            StoppingGeneration   the old generation shuts down
        in place:
            StoppingGeneration   the old generation shuts down, requests wait in the front ends
            StartingNewEngine    the new engine starts and gets all open requests

Of several engines with unchanged files, each goes this way from AwaitingProcesses on, one after
another. If files have changed, the first does, and after its switch no old one gets new requests:

    EachEngine            for each of the others
            DrainingOldEngine    open requests finish
            StoppingGeneration   the old generation shuts down
            AwaitingRestart      the recovery starts the new one

In place, requests of one of several engines continue at the others: before ConnectingFrontEnds
StoppingGeneration ends it, after it all is as side by side.

Every method that handles an event returns the phase that follows. After a failure before the switch
of an engine its old generation continues or, in place, is started again.
"""

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from deploy.models.store import note_start
from deploy.supervisor import exit_report
from deploy.supervisor.epochs import EngineNumbers, EpochCounter, ServedModels
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
    Switched,
    SwitchEngine,
)
from proto.messages.lora import AdapterList

CONNECT_SECONDS: Final = 600.0
"""Limit for the new generation to load and to be connected to every front end."""


@dataclass(frozen=True)
class ReloadOutcome:
    """End of a reload.

    error: "" for success. retry: whether to try again. num_new: engines that are new.
    """

    error: str = ""
    retry: bool = False
    num_new: int = 0


@dataclass
class ReloadContext:
    """The parts of the supervisor that the phases use.

    clock: monotonic seconds.
    outcomes: each reload appends one, not always in its last phase; `Reload` removes it.
    errors: by engine, "" for one that is new; of the reload in progress.
    cancelled: why no further engine is replaced, or "".
    """

    epochs: EpochCounter
    recovery: Recovery
    children: ChildProcesses
    actions: ReloadActions
    strategy: str
    num_front_ends: int
    clock: Callable[[], float] = time.monotonic
    outcomes: list[ReloadOutcome] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    cancelled: str = ""

    def start(self, epochs: EpochCounter, engine: int = 0) -> None:
        """Start an engine and its workers, of the generation that they have in `epochs`."""
        for index in epochs.workers_of(engine):
            self.children.start(epochs.make_boot("worker", index))
        self.children.start(epochs.make_boot("engine_core", engine))

    def note_end(self, engine: int, error: str = "") -> None:
        """Note that an engine is new, or why it is not; the last one concludes the reload."""
        self.errors[engine] = error
        if len(self.errors) == self.epochs.num_engines:
            self.conclude()

    def conclude(self, error: str = "", *, retry: bool = False) -> None:
        """End the reload; for one of several engines by this error, or by those of engines."""
        named = [f"engine {engine}: {text}" for engine, text in sorted(self.errors.items()) if text]
        num_new = len(self.errors) - len(named)
        self.outcomes.append(ReloadOutcome(error or "\n".join(named), retry, num_new))


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


@dataclass(frozen=True)
class ReloadPlan:
    """What a reload brings. is_unchanged: exactly what is served, so that engines are all alike."""

    models: ServedModels
    is_unchanged: bool


class PreparingModel(ReloadPhase):
    """Prepares the model again, because its files may have changed, or another one.

    model: the other one; None for the one that is served.
    """

    def __init__(self, context: ReloadContext, model: str | None) -> None:
        super().__init__(context)
        self._preparation = context.actions.start_preparation(model)

    def advance(self) -> ReloadPhase:
        context, old = self._context, self._context.epochs.models
        if not self._preparation.has_ended():
            return self
        try:
            models = self._preparation.result()
            context.actions.check_model(old.model, models.model)
        except ModelError as error:
            return self.cancel(str(error))
        context.actions.end_preparation(self._preparation)
        plan = ReloadPlan(models, context.actions.is_unchanged(old, models))
        return AwaitingProcesses(context, plan).advance()

    def cancel(self, reason: str) -> ReloadPhase:
        self._context.actions.end_preparation(self._preparation)
        self._context.conclude(reason)
        return IdlePhase(self._context)


class AwaitingProcesses(ReloadPhase):
    """Waits until no process is being restarted, then begins with an engine that is not new.

    One that rests, or that has ended for the reload, goes first: it has no requests.
    """

    def __init__(self, context: ReloadContext, plan: ReloadPlan) -> None:
        super().__init__(context)
        self._plan = plan

    def advance(self) -> ReloadPhase:
        context, epochs, recovery = self._context, self._context.epochs, self._context.recovery
        if context.cancelled:
            return self.cancel(context.cancelled)
        if recovery.has_outages:
            return self
        note_start(*self._plan.models)
        in_place = not self._run_side_by_side()
        if epochs.num_engines == 1:
            return self._connect(0, in_place=in_place)
        waiting = [each for each in range(epochs.num_engines) if each not in context.errors]
        engine = next(filter(recovery.rests, waiting), waiting[0])
        if not in_place and not recovery.rests(engine):
            return self._connect(engine)
        old = epochs.begin_generation(engine)
        recovery.reserve(engine)
        epoch = epochs.epochs[engine]
        message = NewEngine(epoch, epoch, died=False, engine=engine)
        context.children.send_to_front_ends(message)
        return StoppingGeneration(context, old, ON_REQUEST, lambda: self._connect(engine))

    def _connect(self, engine: int, *, in_place: bool = False) -> ReloadPhase:
        context = self._context
        if context.cancelled:
            return self.cancel(context.cancelled)
        return ConnectingFrontEnds(context, self._plan, engine, in_place=in_place).begin()

    def _run_side_by_side(self) -> bool:
        """Whether both engines run at once; never with a frozen one, which finishes nothing."""
        context = self._context
        if context.epochs.pause_mode == "freeze":
            return False
        old, new = context.epochs.models.model, self._plan.models.model
        return context.strategy == "side-by-side" or (
            context.strategy == "auto" and context.actions.two_generations_fit(old, new)
        )

    def cancel(self, reason: str) -> ReloadPhase:
        self._context.conclude(reason)
        for engine in range(self._context.epochs.num_engines):
            self._context.recovery.release(engine)
        return IdlePhase(self._context)


class ConnectingFrontEnds(ReloadPhase):
    """Front ends get ready for a new engine, which starts meanwhile if side by side.

    in_place: it starts later, in the place of the only engine.
    """

    def __init__(
        self, context: ReloadContext, plan: ReloadPlan, engine: int, *, in_place: bool
    ) -> None:
        super().__init__(context)
        self._plan = plan
        self._engine = engine
        self._in_place = in_place
        self._epochs = context.epochs.next_generation(
            plan.models, engine, is_first=not context.errors
        )
        self._next = self._epochs.numbers_of(engine)
        self._missing = set(range(context.num_front_ends))
        self._deadline = context.clock() + CONNECT_SECONDS

    def begin(self) -> ReloadPhase:
        try:
            if not self._in_place:
                self._context.start(self._epochs, self._engine)
        except StartError as error:
            return self.cancel(str(error))
        model = None if self._context.errors else self._epochs.models.model
        self._context.children.send_to_front_ends(
            NextEngine(self._next.epoch, model, self._in_place, self._engine)
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
        if self._next.has_sent(message):
            return self.cancel("one of its processes sent an invalid message")
        if isinstance(message, Paused) and message.mode != self._epochs.pause_mode:
            # the new engine was started with another pause mode
            return self._stop("the engine was paused or resumed meanwhile", retry=True)
        if isinstance(message, AdapterList):
            return self._note_adapters(message)
        if not isinstance(message, NextReady) or message.epoch != self._next.epoch:
            return self
        if message.error is not None:
            return self.cancel(exit_report.user_error(message.error) or message.error.message)
        self._missing.discard(message.index)
        return self

    def _note_adapters(self, message: AdapterList) -> ReloadPhase:
        """Note adapters that the new engine loads at its start, or that the old ones have now."""
        if message.epoch >= self._next.generation:
            self._epochs.adopt_adapters(message)
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
        return self._next.owns(dead)

    def note_death(self, dead: Child) -> ReloadPhase:
        if self.handles_death_of(dead):
            return self.cancel(describe_death(dead))
        return self._stop(f"{dead.name} died meanwhile", retry=True)

    def cancel(self, reason: str) -> ReloadPhase:
        return self._stop(reason, retry=False)

    def _stop(self, reason: str, *, retry: bool) -> ReloadPhase:
        """End the new engine; begin again with it, or with the whole reload, or not at all."""
        context, engine = self._context, self._engine
        context.children.send_to_front_ends(DropEngine(self._next.epoch))
        if retry and (context.errors or context.recovery.rests(engine)):
            again = AwaitingProcesses(context, self._plan)
            return StoppingGeneration(context, self._next, AFTER_FAILURE, again.advance)
        if context.epochs.num_engines > 1:
            reason = f"engine {engine}: {reason}"
        context.conclude(reason, retry=retry)
        return StoppingGeneration(context, self._next, AFTER_FAILURE, self._leave_to_recovery)

    def _leave_to_recovery(self) -> ReloadPhase:
        self._context.recovery.release(self._engine)
        return IdlePhase(self._context)

    def _switch(self) -> ReloadPhase:
        context, engine, epoch = self._context, self._engine, self._next.epoch
        epochs, children, old_models = context.epochs, context.children, context.epochs.models
        old = epochs.switch_to(self._epochs, engine)
        if self._in_place:
            children.send_to_front_ends(NewEngine(epoch, self._next.worker_epoch, died=False))
            following = StartingNewEngine(context, old_models)
            return StoppingGeneration(context, old, ON_REQUEST, following.begin)
        context.recovery.note_replaced(engine)
        first = DrainingOldEngine(context, old, old_models, self._begin_next)
        if epochs.num_engines == 1 or self._plan.is_unchanged:
            children.send_to_front_ends(SwitchEngine(epoch, engine))
            return first
        others = [each for each in range(epochs.num_engines) if each != engine]
        numbers = [epochs.begin_generation(other) for other in others]
        children.send_to_front_ends(SwitchEngine(epoch, engine, tuple(epochs.epochs)))
        phases: list[ReloadPhase] = [first]
        for each in numbers:
            then = AwaitingRestart(context, each.engine).advance
            draining = DrainingOldEngine(context, each, old_models, then, switches=False)
            has_ended = context.recovery.rests(each.engine)
            context.recovery.reserve(each.engine)
            phases.append(draining.abandon() if has_ended else draining)
        return EachEngine(context, phases)

    def _begin_next(self) -> ReloadPhase:
        """Return the phase after the old engine has ended."""
        context = self._context
        if self._plan.is_unchanged and len(context.errors) < context.epochs.num_engines:
            return AwaitingProcesses(context, self._plan)
        return IdlePhase(context)


class EachEngine(ReloadPhase):
    """A phase for each engine, until all are idle."""

    def __init__(self, context: ReloadContext, phases: list[ReloadPhase]) -> None:
        super().__init__(context)
        self._phases = phases

    def _enter(self, phases: list[ReloadPhase]) -> ReloadPhase:
        self._phases = phases
        return IdlePhase(self._context) if all(each.idle for each in phases) else self

    def advance(self) -> ReloadPhase:
        return self._enter([each.advance() for each in self._phases])

    def seconds_to_next_step(self) -> float | None:
        limits = [each.seconds_to_next_step() for each in self._phases]
        return min((limit for limit in limits if limit is not None), default=None)

    def note_message(self, message: Message) -> ReloadPhase:
        return self._enter([each.note_message(message) for each in self._phases])

    def handles_death_of(self, dead: Child) -> bool:
        return any(each.handles_death_of(dead) for each in self._phases)

    def is_stopping(self, process: Child) -> bool:
        return any(each.is_stopping(process) for each in self._phases)

    def disconnect(self, hung: Child) -> ReloadPhase:
        return self._enter([each.disconnect(hung) for each in self._phases])

    def note_death(self, dead: Child) -> ReloadPhase:
        return self._enter([each.note_death(dead) for each in self._phases])


class DrainingOldEngine(ReloadPhase):
    """An old engine finishes its requests, beside the new one if that runs already.

    old: the old engine, which had `old_models`. then: begins the phase after it has ended.
    switches: front ends switch to the new engine now, which completes the reload of this one.
    """

    def __init__(
        self,
        context: ReloadContext,
        old: EngineNumbers,
        old_models: ServedModels,
        then: Callable[[], ReloadPhase],
        *,
        switches: bool = True,
    ) -> None:
        super().__init__(context)
        self._old = old
        self._old_models = old_models
        self._then = then
        self._epoch = context.epochs.epochs[old.engine]
        self._missing = set(range(context.num_front_ends))
        self._switching = set(self._missing) if switches else set()

    def note_message(self, message: Message) -> ReloadPhase:
        if isinstance(message, Switched) and message.epoch == self._epoch:
            self._note_switched(message.index)
        elif isinstance(message, OldEngineIdle) and message.epoch == self._old.epoch:
            return self._note_idle(message.index)
        elif self._old.has_sent(message):
            return self.abandon()
        elif isinstance(message, Paused):
            _pause_both_engines(self._context, self._old, message)
        elif isinstance(message, AdapterList) and message.epoch == self._old.epoch:
            self._pass_on_adapters(message)
        return self

    def _pass_on_adapters(self, message: AdapterList) -> None:
        """Give the new engine the adapters of the old one, which a front end has called late."""
        epochs = self._context.epochs
        if self._old_models.model.source == epochs.models.model.source:
            epochs.adopt_adapters(message)
            whole = AdapterList(message.epoch, list((epochs.adapters or {}).values()))
            generation = epochs.generations[self._old.engine]
            for child in self._context.children.of_generation(generation):
                if child.role == "engine_core":
                    child.send(whole)

    def handles_death_of(self, dead: Child) -> bool:
        return self._old.owns(dead)

    def disconnect(self, hung: Child) -> ReloadPhase:
        return self.abandon() if self.handles_death_of(hung) else self

    def note_death(self, dead: Child) -> ReloadPhase:
        """Abandon the old generation if it died; the requests of a dead front end are gone."""
        if self.handles_death_of(dead):
            return self.abandon()
        return self._note_idle(dead.index) if dead.role == "api_server" else self

    def abandon(self) -> ReloadPhase:
        """End the old generation; its requests continue at another engine."""
        self._context.children.send_to_front_ends(DropEngine(self._old.epoch))
        for index in list(self._switching):
            self._note_switched(index)  # it has switched before it receives DropEngine
        return StoppingGeneration(self._context, self._old, AFTER_FAILURE, self._then)

    def _note_switched(self, index: int) -> None:
        if index in self._switching:
            self._switching.remove(index)
            if not self._switching:
                self._context.note_end(self._old.engine)

    def _note_idle(self, index: int) -> ReloadPhase:
        self._note_switched(index)
        self._missing.discard(index)
        if self._missing:
            return self
        return StoppingGeneration(self._context, self._old, ON_REQUEST, self._then)


class StoppingGeneration(ReloadPhase):
    """An unused engine and its workers shut down. then: begins the phase after that."""

    def __init__(
        self,
        context: ReloadContext,
        old: EngineNumbers,
        limits: ShutdownLimits,
        then: Callable[[], ReloadPhase],
    ) -> None:
        super().__init__(context)
        self._old = old
        self._then = then
        self._shutdown = ShutdownSequence(
            context.children.of_generation(old.generation), limits, context.clock
        )

    def advance(self) -> ReloadPhase:
        self._shutdown.send_due_signals()
        if self._context.children.of_generation(self._old.generation):
            return self
        self._context.epochs.remove_sockets(self._old.epoch, self._old.worker_epoch)
        self._context.children.close_weight_files(self._context.epochs.weights_generation)
        return self._then()

    def note_message(self, message: Message) -> ReloadPhase:
        if isinstance(message, Paused):
            _pause_both_engines(self._context, self._old, message)
        return self

    def seconds_to_next_step(self) -> float | None:
        return self._shutdown.seconds_to_next_signal()

    def handles_death_of(self, dead: Child) -> bool:
        return self._old.owns(dead)

    def is_stopping(self, process: Child) -> bool:
        return self.handles_death_of(process)


class StartingNewEngine(ReloadPhase):
    """In place: the only engine loads again. If it fails, one with the old `models` is started."""

    def __init__(self, context: ReloadContext, models: ServedModels) -> None:
        super().__init__(context)
        self._models = models

    def begin(self) -> ReloadPhase:
        self._context.start(self._context.epochs)
        return self

    def note_message(self, message: Message) -> ReloadPhase:
        (epoch,) = self._context.epochs.epochs
        if not isinstance(message, EngineReady) or message.epoch != epoch:
            return self
        self._context.children.send_to_front_ends(SwitchEngine(epoch))
        self._context.note_end(0)
        return IdlePhase(self._context)

    def handles_death_of(self, dead: Child) -> bool:
        return self._context.epochs.numbers_of(0).owns(dead)

    def note_death(self, dead: Child) -> ReloadPhase:
        if not self.handles_death_of(dead):
            return self
        epochs, children = self._context.epochs, self._context.children
        self._context.conclude(describe_death(dead))
        failed = epochs.switch_to(epochs.next_generation(self._models, 0, is_first=True), 0)
        children.send_to_front_ends(DropEngine(failed.epoch))
        old = epochs.numbers_of(0)
        children.send_to_front_ends(NewEngine(old.epoch, old.worker_epoch, died=False))
        return StoppingGeneration(self._context, failed, ON_REQUEST, self._start_old_model)

    def _start_old_model(self) -> ReloadPhase:
        self._context.start(self._context.epochs)
        return IdlePhase(self._context)


class AwaitingRestart(ReloadPhase):
    """The recovery starts one of several engines with the new model, after the old one has ended.

    One at a time, because each looks how much memory is free. The recovery tries again if it fails.
    """

    def __init__(self, context: ReloadContext, engine: int) -> None:
        super().__init__(context)
        self._engine = engine

    def advance(self) -> ReloadPhase:
        recovery = self._context.recovery
        if not recovery.rests(self._engine):
            return self
        if self._context.cancelled:
            return IdlePhase(self._context)
        if not recovery.has_outages:
            recovery.release(self._engine)
        return self

    def note_message(self, message: Message) -> ReloadPhase:
        epoch = self._context.epochs.epochs[self._engine]
        if isinstance(message, EngineReady) and message.epoch == epoch:
            return self._end()
        return self

    def note_death(self, dead: Child) -> ReloadPhase:
        if self._context.epochs.numbers_of(self._engine).owns(dead):
            return self._end(describe_death(dead))
        return self

    def _end(self, error: str = "") -> ReloadPhase:
        self._context.note_end(self._engine, error)
        return IdlePhase(self._context)


def _pause_both_engines(context: ReloadContext, old: EngineNumbers, message: Paused) -> None:
    """Apply a pause or resume to both engines, whichever engine got the admin call.

    That is the old one if the front end had not switched yet, or if the message was in transit
    when it did:

        operator ─▶ front end ─▶ engine 1 ─ Paused ──────────────┐
        supervisor ──── SwitchEngine(2) ─────────────────────────┴─▶ engine 2 gets it, too

    Both engines get all of these messages in the same order, so they end in the same state.
    """
    context.epochs.pause_mode = message.mode
    for generation in (old.generation, context.epochs.generations[old.engine]):
        for child in context.children.of_generation(generation):
            if child.role == "engine_core":
                child.send(message)


def describe_death(dead: Child) -> str:
    """Describe for the user why a process could not start."""
    message = exit_report.user_error(dead.fatal_error)
    if message is not None:
        return message
    lines = [f"{dead.name} (pid {dead.pid}) {exit_report.describe_exit(dead)}"]
    if dead.fatal_error is not None:
        lines.append(textwrap.indent(dead.fatal_error.traceback.rstrip(), "  "))
    return "\n".join(lines)
