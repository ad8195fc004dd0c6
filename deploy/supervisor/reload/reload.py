"""Reloads: replace engine and workers of a running daemon without losing a request.

`Reload` begins a reload and passes events to its present phase (phases.py). `ReloadReporter` tells
the operator, the service manager and `tokend reload` how it proceeds.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

from deploy.display import Display
from deploy.notify import SystemdNotifier
from deploy.supervisor.processes import Child
from deploy.supervisor.reload.phases import IdlePhase, PreparingModel, ReloadContext, ReloadPhase
from proto.codec import Message, changed
from proto.messages.lifecycle import DaemonState
from proto.runtime.run_directory import replace_file, write_state

_MODEL_FILE: Final = "reload-model"
"""Holds the model that `tokend reload MODEL` asks for."""


def write_wanted_model(run_dir: str, model: str) -> None:
    """Leave the model that the next SIGHUP switches to; raises OSError."""
    replace_file(run_dir, _MODEL_FILE, os.fsencode(model))


def take_wanted_model(run_dir: str) -> str | None:
    """Return the model that a command has left, and remove it; None for none."""
    path = Path(run_dir, _MODEL_FILE)
    try:
        model = os.fsdecode(path.read_bytes())
        path.unlink()
    except OSError:
        return None
    return model


class ReloadReporter:
    """Reports reloads to the operator, the service manager and `tokend reload`.

    The last reads the state of the daemon in the run directory.
    state: of a daemon without reloads.
    """

    def __init__(
        self, run_dir: str, state: DaemonState, display: Display, notifier: SystemdNotifier
    ) -> None:
        self._run_dir = run_dir
        self._state = state
        self._display = display
        self._notifier = notifier
        self._count = 0
        self._ending = False
        self._write_state()

    def report_begin(self) -> None:
        self._write_state(under_way=True)
        self._notifier.report_reloading()
        self._display.event("tokend", "reloads: requests continue meanwhile")

    def report_delay(self, reason: str) -> None:
        """Report why a requested reload does not begin yet, or never."""
        self._display.notice(reason, level="WARNING")

    def report_end(
        self,
        error: str,
        num_new: int,
        seconds: float,
        model: str,
        source: str,
        paths: tuple[str, ...],
        *,
        another: bool,
    ) -> None:
        """Report the end of a reload.

        error: "" for success. num_new: engines that are new.
        model, source, paths: of the model that is served now, as in DaemonState.
        another: whether one more reload follows.
        """
        self._count += 1
        if error:
            number = self._state.num_engines
            new = f"{num_new} of {number} engines {'is' if num_new == 1 else 'are'} new"
            error = f"{new if num_new else 'nothing has changed'}: {error}"
        switched = model != self._state.model
        self._state = changed(self._state, model=model, source=source, paths=paths)
        self._write_state(another, error)
        follows = "; another one follows" if another else ""
        if error:
            what = f"the reload failed, {error}{follows}"
            self._display.notice(what, level="WARNING")
        else:
            now = f": the model is {model} now" if switched else ""
            self._display.event("tokend", f"reloaded after {seconds:.1f} s{now}{follows}")
        self._notifier.report_reloaded()

    def report_ending(self) -> None:
        """Report that the daemon drains or stops: `tokend reload` does not wait for a reload."""
        if not self._ending:
            self._ending = True
            self._write_state()

    def _write_state(self, under_way: bool = False, error: str = "") -> None:
        state = changed(
            self._state,
            count=self._count,
            under_way=under_way,
            error=error,
            ending=self._ending,
        )
        with contextlib.suppress(OSError):  # a full disk must not end the daemon
            write_state(self._run_dir, state)


class Reload:
    """At most one reload in progress, and at most one more that is requested."""

    def __init__(self, context: ReloadContext, reporter: ReloadReporter) -> None:
        self._context = context
        self._reporter = reporter
        self._requested = False
        self._allowed = True
        self._begun_at = 0.0
        self._wanted: str | None = None
        self._model: str | None = None  # of the reload in progress
        self._phase: ReloadPhase = IdlePhase(context)

    def request(self, model: str | None = None) -> None:
        """Request a reload; it begins as soon as it can.

        model: to switch to; None for the one that is served, or that a waiting request named.
        """
        self._wanted = model or self._wanted
        if not self._allowed:
            self._reporter.report_delay("the daemon is about to end: there is no reload")
        elif self._requested:
            self._reporter.report_delay(
                "a reload is in progress and another one follows it already"
            )
        elif not self._phase.idle:
            self._reporter.report_delay("a reload is in progress: another one follows it")
        elif self._context.recovery.has_outages:
            self._reporter.report_delay("a reload follows when all processes are back")
        self._requested = self._allowed

    def advance(self) -> None:
        self._enter(self._phase.advance())
        if self._requested and self._phase.idle and not self._context.recovery.has_outages:
            self._requested = False
            self._begun_at = self._context.clock()
            self._reporter.report_begin()
            self._begin()

    @property
    def under_way(self) -> bool:
        return not self._phase.idle

    def seconds_to_next_step(self) -> float | None:
        return self._phase.seconds_to_next_step()

    def is_stopping(self, process: Child) -> bool:
        return self._phase.is_stopping(process)

    def note_message(self, message: Message) -> None:
        self._enter(self._phase.note_message(message))

    def handles_death_of(self, process: Child) -> bool:
        return self._phase.handles_death_of(process)

    def disconnect(self, hung: Child) -> bool:
        """Disconnect the others from a process that will be killed; return whether that is done."""
        handled = self.handles_death_of(hung)
        self._enter(self._phase.disconnect(hung))
        return handled

    def note_death(self, dead: Child) -> bool:
        """Handle the death of any process; return whether `Recovery` must not restart it."""
        handled = self.handles_death_of(dead)
        self._enter(self._phase.note_death(dead))
        return handled

    def cancel(self, reason: str) -> None:
        """Cancel the reload and refuse further ones, because the daemon shuts down."""
        self._allowed = self._requested = False
        self._context.cancelled = reason
        self._enter(self._phase.cancel(reason))
        self._reporter.report_ending()

    def _begin(self) -> None:
        try:
            self._model, self._wanted = self._wanted, None
            self._context.errors.clear()
            self._phase = PreparingModel(self._context, self._model)
        except OSError as error:
            self._context.conclude(f"no process could be started: {error.strerror}")
            self._enter(self._phase)

    def _enter(self, phase: ReloadPhase) -> None:
        """Enter a phase, and report the end of the reload if the last one has concluded it."""
        self._phase = phase
        while self._context.outcomes:
            outcome = self._context.outcomes.pop(0)
            if outcome.retry:
                self._wanted = self._wanted or self._model
            elif outcome.num_new:
                self._context.actions.note_reloaded(self._model)
            self._requested = self._requested or (outcome.retry and self._allowed)
            seconds = self._context.clock() - self._begun_at
            models = self._context.epochs.models
            self._reporter.report_end(
                outcome.error,
                outcome.num_new,
                seconds,
                self._context.actions.served_name(models.model),
                self._context.actions.source,
                models.paths,
                another=self._requested,
            )
