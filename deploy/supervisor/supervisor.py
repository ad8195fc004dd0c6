"""The supervisor: starts, watches, restarts and stops all processes of a daemon.

Owns the children, the run directory and the death pipe. Imports no torch. One loop waits for links,
process descriptors and signals. As process 1 of a container it also reaps orphans.

Until the daemon is ready for the first time, any death ends it. After that a dead process is
restarted (a worker together with all workers of its model), and the others are notified.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from deploy.display import Display
from deploy.reload.actions import ProcessActions
from deploy.reload.progress import ReloadNews
from deploy.reload.reload import NoReload, Reload
from deploy.supervisor.epochs import Announcement, EpochCounter
from deploy.supervisor.exit_report import Failures
from deploy.supervisor.hang_detector import Limits
from deploy.supervisor.launch import Launch
from deploy.supervisor.notify import Notifier
from deploy.supervisor.processes import Child, child_environment, reap_adopted
from deploy.supervisor.readiness import Readiness
from deploy.supervisor.recovery import Recovery, RestartBudget
from deploy.supervisor.shutdown import (
    AFTER_A_DEATH,
    ON_REQUEST,
    Draining,
    Ending,
    NotDraining,
    NotEnding,
    ShutdownLimits,
)
from deploy.supervisor.signals import HangUp, SignalInbox
from deploy.supervisor.watchdog import Watchdog
from proto import PROTOCOL_VERSION
from proto.lifecycle import (
    AbortRequests,
    Drain,
    DrainProgress,
    DrainRequested,
    EngineReady,
    FrontEndReady,
    FrontEndStalled,
    NewFrontEnd,
    Notice,
    ProcessBoot,
    Progress,
    ProtocolViolation,
    Role,
)
from proto.run_directory import RunDirectory
from proto.sockets import Poller
from proto.stats import METRIC_BYTES

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_SAME_SIGNAL_SECONDS: Final = 0.05
"""A signal sent to a process group arrives again when a parent such as make passes it on."""


class Supervisor:
    """Runs one daemon from the start of its processes to the end of the last.

    limits: how long processes may take to end after a stop signal.
    """

    def __init__(
        self,
        launch: Launch,
        run_parent: str,
        display: Display,
        on_ready: Callable[[Readiness], None],
        notifier: Notifier,
        limits: ShutdownLimits = ON_REQUEST,
    ) -> None:
        self._launch = launch
        self._patience = limits
        self._run_parent = run_parent
        self._display = display
        self._on_ready = on_ready
        self._notifier = notifier
        self._running: list[Child] = []
        self._poller = Poller()
        self._failures = Failures(display)
        self._signalled_at = 0.0
        self._num_signals = 0
        self._hang_up = HangUp()
        self._reload: Reload | NoReload = NoReload()
        self._preparing: set[int] = set()
        self._draining: Draining | NotDraining = NotDraining()
        self._ending: Ending | NotEnding = NotEnding()
        self._status = 0
        self._readiness = Readiness(1, range(launch.front_ends))

    def run(self) -> int:
        """Run until no process is left, and return the exit status of the command.

        0 after a stop signal, even if requests were aborted; 128 + n if a further signal killed
        the processes; 1 if a process failed; 2 if it failed because of an error that the user
        must fix.
        """
        with SignalInbox((*_STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD)) as signals:
            directory = RunDirectory.create(self._run_parent)
            death_pipe = os.pipe()
            metrics_fd = os.memfd_create("tokend-metrics")
            os.ftruncate(metrics_fd, self._launch.front_ends * METRIC_BYTES)
            try:
                epochs = self._epochs(directory.path, death_pipe[0], metrics_fd)
                recovery = self._recovery(epochs)
                watchdog = self._watchdog(epochs, recovery)
                self._reload = self._reloads(epochs, recovery, directory.path)
                for role, index in self._launch.processes():
                    self._start(epochs.boot(role, index))
                self._watch(signals, recovery, watchdog)
            finally:
                self._kill_rest()
                self._display.close()
                for descriptor in (*death_pipe, metrics_fd):
                    os.close(descriptor)
                directory.leave()
        status = self._failures.conclude(self._status, serving=self._readiness.complete)
        if status == 0:
            self._display.notice("stopped; nothing is left running")
        return status

    def _epochs(self, run_dir: str, death_fd: int, metrics_fd: int) -> EpochCounter:
        launch = self._launch
        template = ProcessBoot(
            protocol_version=PROTOCOL_VERSION,
            role="engine_core",
            index=0,
            incarnation=0,
            epoch=0,
            worker_epoch=0,
            run_dir=run_dir,
            death_fd=death_fd,
            config=launch.config,
            model=launch.model,
            faults=launch.faults,
            metrics_fd=metrics_fd,
        )
        return EpochCounter(template, tuple(listener.fileno() for listener in launch.listeners))

    def _recovery(self, epochs: EpochCounter) -> Recovery:
        config = self._launch.config
        budget = RestartBudget(config.reliability.max_restarts)
        return Recovery(epochs, budget, self._display, config.parallel.tensor_parallel_size)

    def _watchdog(self, epochs: EpochCounter, recovery: Recovery) -> Watchdog:
        limits = Limits.of(self._launch.config.reliability)
        return Watchdog(limits, epochs, recovery, self._display)

    def _reloads(self, epochs: EpochCounter, recovery: Recovery, run_dir: str) -> Reload:
        launch = self._launch
        actions = ProcessActions(
            self._running,
            self._start,
            self._poller,
            launch.config,
            launch.prepare,
            launch.variables,
            lambda: self._readiness.engine,
            self._preparing,
        )
        news = ReloadNews(run_dir, self._display, self._notifier)
        return Reload(
            epochs,
            recovery,
            actions,
            news,
            launch.config.reliability.reload_strategy,
            launch.front_ends,
            launch.config.parallel.tensor_parallel_size,
        )

    def _start(self, boot: ProcessBoot) -> None:
        """Start a process; it waits for the processes that it depends on."""
        launch = self._launch
        env = child_environment(
            launch.variables,
            boot.role,
            launch.config.device,
            launch.config.parallel.tensor_parallel_size,
        )
        child = Child(boot, launch.commands[boot.role], env)
        if self._draining.begun and boot.role == "api_server":
            child.tell(Drain())
        self._running.append(child)
        self._poller.add(child.link)
        self._poller.add(child.pidfd)

    def _watch(self, signals: SignalInbox, recovery: Recovery, watchdog: Watchdog) -> None:
        """Run the main loop until shutdown is complete."""
        self._poller.add(signals.fileno())
        while self._running or not self._ending.begun:
            self._poller.wait(self._seconds_to_sleep(recovery, watchdog))
            self._notifier.beat(watchdog.copes)
            for number in signals.take():
                self._obey(number)
            for child in list(self._running):
                self._hear(child, recovery, watchdog)
                if child.has_ended():
                    self._hear(child, recovery, watchdog)  # what it said since
                    self._bury(child, recovery)
            reap_adopted({child.pid for child in self._running} | self._preparing)
            if self._draining.over and not self._ending.begun:
                self._abort()
            if self._ending.begun:
                self._ending.press()
            else:
                self._go_on(recovery, watchdog)

    def _go_on(self, recovery: Recovery, watchdog: Watchdog) -> None:
        """Do what is due before shutdown, also while draining: reload, restarts, hang detection."""
        if self._serving:
            self._reload.press()
        self._replace_the_dead(recovery)
        watched = [child for child in self._running if not self._reload.is_ending(child)]
        watchdog.turn(watched, lambda hung: self._cut_off(hung, recovery))

    def _seconds_to_sleep(self, recovery: Recovery, watchdog: Watchdog) -> float | None:
        """Seconds until something is due without an event; None for never."""
        limits = [self._notifier.seconds_to_next_beat()]
        if self._ending.begun:
            limits.append(self._ending.seconds_to_next_step())
        else:
            limits += (recovery.seconds_to_next(), watchdog.seconds_to_next())
            limits += (self._draining.seconds_left(), self._reload.seconds_left())
        return min((each for each in limits if each is not None), default=None)

    def _replace_the_dead(self, recovery: Recovery) -> None:
        for child in self._of_now():
            if recovery.must_go(child.role):
                child.signal(signal.SIGKILL)
        for each in recovery.take_due(self._of_now()):
            self._announce(each.told)  # also to those that were started just now
            for boot in each.boots:
                self._start(boot)

    def _announce(self, announcements: Sequence[Announcement]) -> None:
        """Send messages to the current generation, and NewFrontEnd to all engines."""
        for role, message in announcements:
            for child in self._running:
                is_meant = isinstance(message, NewFrontEnd) or self._reload.is_of_now(child)
                if child.role == role and is_meant:
                    child.tell(message)

    def _of_now(self) -> list[Child]:
        """All processes, except those of another generation during a reload."""
        return [child for child in self._running if self._reload.is_of_now(child)]

    def _cut_off(self, hung: Child, recovery: Recovery) -> None:
        """Disconnect the other processes from one that will be killed, if it will be replaced."""
        if self._serving and not self._reload.cut_off(hung):
            self._announce(recovery.cut_off(hung))

    def _hear(self, child: Child, recovery: Recovery, watchdog: Watchdog) -> None:
        for message in child.receive():
            watchdog.hear(child, message)
            self._handle(child, message, recovery)
        if child.last_words is not None and not self._serving:
            self._fail(child)

    @property
    def _serving(self) -> bool:
        return self._readiness.complete and not self._ending.begun

    def _handle(self, child: Child, message: Any, recovery: Recovery) -> None:
        if isinstance(message, Progress):
            if not self._readiness.complete:
                self._display.progress(message.what, message.fraction, child.name)
        elif isinstance(message, Notice):
            self._display.notice(message.message, child.name)
        elif isinstance(message, FrontEndStalled):
            self._kill_life("api_server", message.index, message.incarnation)
        elif isinstance(message, DrainProgress):
            self._draining.note(message)
        elif isinstance(message, DrainRequested):
            self._drain()
        elif isinstance(message, AbortRequests):
            for each in self._running:
                if each.role == "api_server":
                    each.tell(message)
        elif self._readiness.complete or isinstance(message, ProtocolViolation):
            self._reload.note(message)
            self._readiness.note_again(message)
            if self._reload.is_of_now(child):
                recovery.note(message)
        elif isinstance(message, EngineReady | FrontEndReady):
            self._readiness.note(message)
            if self._readiness.complete and not self._ending.begun:
                self._display.close()
                self._on_ready(self._readiness)

    def _kill_life(self, role: Role, index: int, incarnation: int) -> None:
        """Kill one incarnation of a process, if it still runs."""
        for child in self._running:
            if (child.role, child.index, child.incarnation) == (role, index, incarnation):
                child.signal(signal.SIGKILL)

    def _bury(self, child: Child, recovery: Recovery) -> None:
        """Handle the exit of a process: read its last messages, restart it or end the daemon."""
        child.await_last_words()
        self._poller.remove(child.link)
        self._poller.remove(child.pidfd)
        self._running.remove(child)
        if self._serving and self._reload.note_death(child):
            pass  # of a generation that comes or goes
        elif self._serving and recovery.can_replace(child):
            recovery.note_death(child)
        elif child.exit_status != 0 or not self._ending.begun:
            self._fail(child)
        child.close()

    def _fail(self, child: Child) -> None:
        """End the daemon after a failure; later failures are mostly consequences of it."""
        if self._ending.begun:
            self._failures.add(child, expected=self._ending.caused(child.exit_status))
        else:
            self._failures.begin(child)
            self._end(AFTER_A_DEATH)

    def _obey(self, number: signal.Signals) -> None:
        """Handle a signal. SIGCHLD only wakes the loop."""
        if number in _STOP_SIGNALS:
            self._stop(number)
        elif number == signal.SIGHUP:
            meaning = self._hang_up.meaning()
            if meaning == "reload":
                self._reload.ask()
            elif meaning == "end":
                self._stop(number)

    def _stop(self, number: signal.Signals) -> None:
        """Drain at the first stop signal, abort requests at the second, kill at the third.

        A drain may have been started by an admin call before, as from a container's preStop hook.
        """
        now = time.monotonic()
        if now - self._signalled_at <= _SAME_SIGNAL_SECONDS:
            return
        self._signalled_at = now
        self._num_signals += 1
        if self._num_signals == 1:
            self._drain()
        elif self._ending.begun:
            self._status = 128 + number
            self._ending.force()
        else:
            self._abort()

    def _drain(self) -> None:
        """Refuse new requests, let open ones finish, then shut down."""
        if self._draining.begun or self._ending.begun:
            return
        if not self._serving:
            self._abort()
            return
        self._reload.give_up("the daemon is about to end")
        seconds = self._launch.config.reliability.shutdown_timeout
        self._notifier.stopping(seconds + self._patience.until_kill)
        self._draining = Draining(range(self._launch.front_ends), seconds, self._display)
        for child in self._running:
            if child.role == "api_server":
                child.tell(Drain())

    def _abort(self) -> None:
        """End in order, whatever is under way."""
        self._draining.report_left()
        self._display.notice("stopping; another signal ends everything at once")
        self._end(self._patience)

    def _end(self, limits: ShutdownLimits) -> None:
        self._reload.give_up("the daemon ends")
        self._notifier.stopping(limits.until_kill)
        for listener in self._launch.listeners:
            listener.close()
        self._ending = Ending(self._running, limits)

    def _kill_rest(self) -> None:
        """Only an error of the supervisor itself leaves any."""
        for child in self._running:
            child.signal(signal.SIGKILL)
            child.wait()
            child.close()
        self._running.clear()
