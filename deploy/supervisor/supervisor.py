"""The supervisor process: starts, watches, restarts and stops all other processes of a daemon.

Start reading at `Supervisor._run_loop`: it waits for messages, exits of processes and signals.

Until the daemon is ready for the first time, the death of any process ends it. After that a dead
process is restarted (a worker together with all workers of its engine), and the others are
notified.
Imports no torch.
"""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

from deploy.display import Display, NoticeLevel
from deploy.notify import SystemdNotifier
from deploy.supervisor.epochs import Announcement, EpochCounter
from deploy.supervisor.exit_report import FailureLog
from deploy.supervisor.hang_detector import HangLimits
from deploy.supervisor.launch import Launch, Readiness, ready_message
from deploy.supervisor.processes import Child, ChildProcesses, StartError, reap_adopted
from deploy.supervisor.recovery import Recovery
from deploy.supervisor.reload.actions import ReloadActions
from deploy.supervisor.reload.phases import ReloadContext
from deploy.supervisor.reload.reload import Reload, ReloadReporter, take_wanted_model
from deploy.supervisor.shutdown import (
    AFTER_FAILURE,
    ON_REQUEST,
    RequestDrain,
    ShutdownLimits,
    ShutdownSequence,
)
from deploy.supervisor.signals import SignalInbox, hangup_action, has_terminal
from deploy.supervisor.standby import StandbyProcesses
from deploy.supervisor.watchdog import Watchdog
from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import (
    AbortRequests,
    Drain,
    DrainProgress,
    DrainRequested,
    EngineReady,
    ForgetImages,
    FrontEndReady,
    FrontEndStalled,
    NewFrontEnd,
    Notice,
    ProcessBoot,
    ProfileFrontEnds,
    Progress,
    ProtocolViolation,
)
from proto.messages.lora import AdapterList
from proto.messages.stats import metric_bytes
from proto.runtime.run_directory import RunDirectory, remove_pixels
from proto.runtime.sockets import Poller

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_SAME_SIGNAL_SECONDS: Final = 0.05
"""A signal sent to a process group arrives again when a parent such as make passes it on."""


class Supervisor:
    """Runs one daemon from the start of its processes to the end of the last.

    shutdown_limits: how long processes may take to exit after a stop signal.
    """

    def __init__(
        self,
        launch: Launch,
        run_parent: str,
        display: Display,
        notifier: SystemdNotifier,
        shutdown_limits: ShutdownLimits = ON_REQUEST,
    ) -> None:
        self._launch = launch
        self._run_parent = run_parent
        self._display = display
        self._notifier = notifier
        self._shutdown_limits = shutdown_limits
        self._poller = Poller()
        self._children = ChildProcesses(launch, self._poller)
        self._readiness = Readiness(launch.num_engines, launch.num_front_ends)
        self._failures = FailureLog(display)
        self._had_terminal = has_terminal()
        # To be asked before `run` gives the signal a handler
        self._under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._last_stop_signal = 0.0
        self._num_stop_signals = 0
        self._drain: RequestDrain | None = None
        self._shutdown: ShutdownSequence | None = None
        self._exit_status = 0

    def run(self) -> int:
        """Run until no process is left, and return the exit status of the command.

        0 after a stop signal, even if requests were aborted; 130 after Ctrl-C before the daemon
        was ready; 128 + n if a further signal killed the processes; 1 if a process failed; 2 if it
        failed because of an error that the user must fix.
        """
        with SignalInbox((*_STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD)) as signals:
            directory = RunDirectory.create(self._run_parent)
            death_pipe = os.pipe()
            metrics_fd = os.memfd_create("tokend-metrics")
            row_bytes = metric_bytes(self._launch.num_engines)
            os.ftruncate(metrics_fd, self._launch.num_front_ends * row_bytes)
            try:
                self._create_parts(directory.path, death_pipe[0], metrics_fd)
                for role, index in self._launch.processes():
                    self._start(self._epochs.make_boot(role, index))
                self._run_loop(signals)
            finally:
                self._children.kill_all()  # only an error of the supervisor itself leaves any
                self._display.close()
                for descriptor in (*death_pipe, metrics_fd):
                    os.close(descriptor)
                directory.leave()
        status = self._failures.report(self._exit_status, serving=self._readiness.complete)
        if status == 0 or (status == self._exit_status and self._num_stop_signals == 1):
            self._display.event("tokend", "stopped; nothing is left running")
        return status

    def _create_parts(self, run_dir: str, death_fd: int, metrics_fd: int) -> None:
        """Create the parts that need the run directory."""
        self._run_dir = run_dir
        launch, config = self._launch, self._launch.config
        template = ProcessBoot(
            protocol_version=PROTOCOL_VERSION,
            role="engine_core",
            index=0,
            incarnation=0,
            epoch=0,
            worker_epoch=0,
            run_dir=run_dir,
            death_fd=death_fd,
            config=config,
            model=launch.model,
            draft_model=launch.draft_model,
            faults=launch.faults,
            metrics_fd=metrics_fd,
        )
        listen_fds = tuple(listener.fileno() for listener in launch.listeners)
        admin_fds = tuple(listener.fileno() for listener in launch.admin_listeners)
        self._epochs = EpochCounter(template, listen_fds, admin_fds)
        max_restarts = config.reliability.max_restarts
        self._recovery = Recovery(self._epochs, max_restarts, self._display)
        limits = HangLimits.of(config.reliability)
        self._watchdog = Watchdog(limits, self._epochs, self._recovery, self._display)
        context = ReloadContext(
            self._epochs,
            self._recovery,
            self._children,
            ReloadActions(launch, self._children, self._poller, self._readiness),
            config.reliability.reload_strategy,
            launch.num_front_ends,
        )
        state = launch.state(os.getpid())
        reporter = ReloadReporter(run_dir, state, self._display, self._notifier)
        self._reload = Reload(context, reporter)
        self._standby = StandbyProcesses(
            self._children, self._epochs, self._recovery, config.reliability, self._display
        )

    def _start(self, boot: ProcessBoot) -> None:
        """Start a process; it waits for the processes that it depends on. Raises StartError."""
        child = self._children.start(boot)
        if child.is_prepared:
            self._display.event(child.name, f"(pid {child.pid}) was on standby and takes the place")
        if self._drain is not None and boot.role == "api_server":
            child.send(Drain())

    # ---- The main loop ----

    def _run_loop(self, signals: SignalInbox) -> None:
        """Run until all processes have exited after a shutdown."""
        self._poller.add(signals.fileno())
        children = self._children
        while children.running or children.standby or self._shutdown is None:
            self._poller.wait(self._seconds_to_sleep())
            self._notifier.send_heartbeat(self._watchdog.can_recover)
            for number in signals.receive():
                self._handle_signal(number)
            for child in (*children.running, *children.standby):
                self._handle_messages(child)
                if child.has_ended():
                    self._handle_messages(child)  # messages that arrived since the last line
                    self._handle_exit(child)
            reap_adopted(children.all_pids())
            if self._drain is not None and self._shutdown is None:
                self._drain.report_begin()
                if self._drain.done:
                    self._shut_down_on_request()
            if self._shutdown is not None:
                self._shutdown.send_due_signals()
            else:
                self._continue_reload()
                self._restart_dead_processes()
                self._remove_hung_processes()
                self._manage_standby()

    def _seconds_to_sleep(self) -> float | None:
        """Return the seconds until something is due without an event; None for never."""
        limits = [self._notifier.seconds_to_next_heartbeat()]
        if self._shutdown is not None:
            limits.append(self._shutdown.seconds_to_next_signal())
        else:
            limits.append(self._recovery.seconds_to_next_restart())
            limits.append(self._watchdog.seconds_to_next_check())
            limits.append(self._reload.seconds_to_next_step())
            limits.append(self._standby.seconds_to_next_start())
            if self._drain is not None:
                limits.append(self._drain.seconds_to_next_step())
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def _serving(self) -> bool:
        """Whether the daemon has been ready and does not shut down yet; it may be draining."""
        return self._readiness.complete and self._shutdown is None

    def _continue_reload(self) -> None:
        if self._serving:
            self._reload.advance()

    # ---- Messages ----

    def _handle_messages(self, child: Child) -> None:
        for message in child.receive():
            self._watchdog.note_message(child, message)
            self._standby.note_message(child, message)
            self._handle_message(child, message)
        if child.fatal_error is not None and child.has_place and not self._serving:
            self._handle_failure(child)

    def _handle_message(self, child: Child, message: Any) -> None:
        if isinstance(message, Progress):
            if not self._readiness.complete:
                self._display.progress(message.what, message.fraction, child.name)
        elif isinstance(message, Notice):
            level: NoticeLevel = "WARNING" if message.is_warning else "INFO"
            self._display.notice(message.message, child.name, level)
        elif isinstance(message, FrontEndStalled):
            self._kill_stalled_front_end(message)
        elif isinstance(message, DrainProgress):
            if self._drain is not None:
                self._drain.note_progress(message)
        elif isinstance(message, DrainRequested):
            self._begin_drain()
        elif isinstance(message, AbortRequests | ProfileFrontEnds | ForgetImages):
            self._children.send_to_front_ends(message)
        elif self._readiness.complete or isinstance(message, ProtocolViolation):
            self._reload.note_message(message)
            self._readiness.note_new_engine(message)
            if self._epochs.is_current(child):
                self._recovery.note_message(message)
        elif isinstance(message, AdapterList):
            self._epochs.note_adapters(message)  # those of --lora-modules
        elif isinstance(message, EngineReady | FrontEndReady):
            self._readiness.note_ready(message)
            if self._readiness.complete and self._shutdown is None:
                self._announce_ready()

    def _announce_ready(self) -> None:
        """Print the ready line and notify the service manager."""
        self._display.begin_log()
        print(ready_message(self._launch, self._readiness), flush=True)
        self._notifier.report_ready(f"serving {self._launch.model.name} at {self._launch.url}")

    def _kill_stalled_front_end(self, message: FrontEndStalled) -> None:
        """Kill the incarnation of a front end that the engine has reported, if it still runs."""
        for child in self._children.front_ends():
            if (child.index, child.incarnation) == (message.index, message.incarnation):
                child.send_signal(signal.SIGKILL)

    # ---- Deaths, restarts and hangs ----

    def _handle_exit(self, child: Child) -> None:
        """Read the last messages of a process that has exited; restart it or end the daemon."""
        child.await_fatal_error()
        self._children.remove(child)
        if child.role == "api_server":
            remove_pixels(self._run_dir, child.index)
        if not child.has_place:
            self._standby.note_death(child)
        elif self._serving and self._reload.note_death(child):
            pass  # the process belonged to a generation that starts or stops
        elif self._serving and self._recovery.can_restart(child):
            self._recovery.note_death(child)
        elif child.exit_status != 0 or self._shutdown is None:
            self._handle_failure(child)
        child.close()

    def _handle_failure(self, child: Child) -> None:
        """End the daemon after a failure; later failures are mostly consequences of it."""
        if self._shutdown is not None:
            expected = self._shutdown.has_caused(child.exit_status)
            self._failures.record_later(child, expected=expected)
        else:
            self._failures.record_first(child)
            self._begin_shutdown(AFTER_FAILURE)

    def _restart_dead_processes(self) -> None:
        """Start successors of dead processes when they are due, and notify the other processes."""
        for child in self._current_processes():
            if self._recovery.must_kill(child):
                child.send_signal(signal.SIGKILL)
        for announcements, boots in self._recovery.pop_due_restarts(self._current_processes()):
            self._announce(announcements)  # processes started just now get them, too
            for boot in boots:
                try:
                    self._start(boot)
                except StartError as error:
                    self._recovery.note_failed_start(boot, error)
                    break

    def _remove_hung_processes(self) -> None:
        """Ping processes and kill those that hang, after the others have disconnected from them."""
        running = self._children.running
        watched = [child for child in running if not self._reload.is_stopping(child)]
        for child in self._watchdog.find_hung([*watched, *self._children.standby]):
            child.is_prepared = False
            self._disconnect(child)
            self._watchdog.begin_removal(child)
        self._watchdog.continue_removals()
        numbers = (self._standby.num_ready("engine_core"), self._standby.num_ready("worker"))
        self._watchdog.report_health(watched, *numbers)

    def _manage_standby(self) -> None:
        """Start standby processes when nothing else is to be started, and end outdated ones."""
        self._standby.discard_outdated()
        is_calm = self._drain is None and not self._reload.under_way
        if self._serving and is_calm and not self._recovery.has_outages:
            self._standby.start_missing()

    def _disconnect(self, hung: Child) -> None:
        """Disconnect the other processes from one that will be killed, if it will be replaced."""
        if self._serving and hung.has_place and not self._reload.disconnect(hung):
            self._announce(self._recovery.disconnect(hung))

    def _announce(self, announcements: Sequence[Announcement]) -> None:
        """Send messages to the current generation, and NewFrontEnd to all engines."""
        for role, message, engine in announcements:
            for child in self._children.running:
                concerned = isinstance(message, NewFrontEnd) or self._epochs.is_current(child)
                is_addressed = child.role == role and engine in (None, child.engine)
                if is_addressed and concerned:
                    child.send(message)

    def _current_processes(self) -> list[Child]:
        """Return all processes, except those of another generation during a reload."""
        return [child for child in self._children.running if self._epochs.is_current(child)]

    # ---- Signals, drain and shutdown ----

    def _handle_signal(self, number: signal.Signals) -> None:
        """Drain, shut down or reload. SIGCHLD only wakes the loop."""
        if number in _STOP_SIGNALS:
            self._handle_stop_signal(number)
        elif number == signal.SIGHUP:
            action = hangup_action(self._had_terminal, self._under_nohup)
            if action == "reload":
                self._reload.request(take_wanted_model(self._run_dir))
            elif action == "stop":
                self._handle_stop_signal(number)

    def _handle_stop_signal(self, number: signal.Signals) -> None:
        """Drain at the first stop signal, abort requests at the second, kill at the third.

        An admin call may have begun a drain before, for example from a container's preStop hook.
        """
        now = time.monotonic()
        if now - self._last_stop_signal <= _SAME_SIGNAL_SECONDS:
            return
        self._last_stop_signal = now
        self._num_stop_signals += 1
        if self._num_stop_signals == 1:
            if number == signal.SIGINT and not self._readiness.complete:
                self._exit_status = 128 + number
            if self._drain is not None and self._shutdown is None:
                self._drain.report_again()
            self._begin_drain()
        elif self._shutdown is not None:
            self._exit_status = 128 + number
            self._shutdown.kill_all()
        else:
            self._shut_down_on_request()

    def _begin_drain(self) -> None:
        """Refuse new requests and let open ones finish; the main loop shuts down after that."""
        if self._drain is not None or self._shutdown is not None:
            return
        if not self._serving:
            self._shut_down_on_request()
            return
        self._reload.cancel("the daemon is about to end")
        seconds = self._launch.config.reliability.shutdown_timeout
        self._notifier.report_stopping(seconds + self._shutdown_limits.until_kill)
        self._drain = RequestDrain(range(self._launch.num_front_ends), seconds, self._display)
        self._children.send_to_front_ends(Drain())

    def _shut_down_on_request(self) -> None:
        """Shut down after a drain, or instead of one."""
        if self._drain is not None:
            self._drain.report_unfinished()
        self._display.event("tokend", "stops; another Ctrl-C or SIGTERM ends everything at once")
        self._begin_shutdown(self._shutdown_limits)

    def _begin_shutdown(self, limits: ShutdownLimits) -> None:
        self._reload.cancel("the daemon ends")
        self._notifier.report_stopping(limits.until_kill)
        for listener in (*self._launch.listeners, *self._launch.admin_listeners):
            listener.close()
        self._standby.discard_all()
        self._shutdown = ShutdownSequence(self._children.running, limits)
