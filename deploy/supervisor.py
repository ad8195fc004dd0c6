"""Everyone's parent: starts the processes, watches them, ends them.

Owns the children, the run directory and the death pipe. Knows nothing of
models, requests or tokens, and imports no torch. One loop waits for links,
process descriptors and signals alike. As process 1 of a container it also reaps
what others have orphaned.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deploy import obituary
from deploy.adopted import reap_adopted
from deploy.child import Child, Commands
from deploy.child_environment import child_environment
from deploy.display import Display
from deploy.ending import AFTER_A_DEATH, ON_REQUEST, Ending, NotEnding, Patience
from deploy.notify import Notifier
from deploy.ready import Readiness
from deploy.signals import SignalInbox
from proto import PROTOCOL_VERSION
from proto.config import ServeConfig
from proto.lifecycle import EngineReady, FrontEndReady, Notice, ProcessBoot, Progress, Role
from proto.prepared_model import PreparedModel
from proto.run_directory import RunDirectory
from proto.sockets import Poller

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_CHAIN_SECONDS: Final = 0.1
"""Failures this close to the first are taken for one chain with one culprit."""
_SAME_SIGNAL_SECONDS: Final = 0.05
"""A signal sent to a process group arrives again when a parent such as make passes it on."""
_FIRST_EPOCH: Final = 1


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    listeners: listening sockets, inherited by every front end.
    variables: environment that the processes get, each role with its own additions.
    commands: how the process of each role is started.
    """

    config: ServeConfig
    model: PreparedModel
    listeners: tuple[socket.socket, ...]
    variables: Mapping[str, str]
    commands: Commands

    def processes(self) -> list[tuple[Role, int]]:
        """Every process, as (role, index)."""
        found: list[tuple[Role, int]] = [
            ("worker", rank) for rank in range(self.config.parallel.tensor_parallel_size)
        ]
        found.append(("engine_core", 0))
        found.extend(("api_server", index) for index in range(self.front_ends))
        return found

    @property
    def front_ends(self) -> int:
        return self.config.frontend.api_server_count


class Supervisor:
    """Runs one daemon from the start of its processes to the end of the last."""

    def __init__(
        self,
        launch: Launch,
        run_parent: str,
        display: Display,
        on_ready: Callable[[EngineReady], None],
        notifier: Notifier,
    ) -> None:
        self._launch = launch
        self._run_parent = run_parent
        self._display = display
        self._on_ready = on_ready
        self._notifier = notifier
        self._running: list[Child] = []
        self._failed: list[Child] = []
        self._first_failure = 0.0
        self._stopped_at = 0.0
        self._ending: Ending | NotEnding = NotEnding()
        self._status = 0
        self._readiness = Readiness(1, range(launch.front_ends))

    def run(self) -> int:
        """Exit status of the command, when nothing of the daemon is left.

        0 after a stop signal, 128 + n when a second one had to force it, 1 when a
        process failed, 2 when it failed over something that the user must change.
        """
        with SignalInbox((*_STOP_SIGNALS, signal.SIGCHLD)) as signals:
            directory = RunDirectory.create(self._run_parent)
            death_pipe = os.pipe()
            try:
                self._start(directory.path, death_pipe[0])
                self._watch(signals)
            finally:
                self._kill_rest()
                self._display.close()
                for descriptor in death_pipe:
                    os.close(descriptor)
                directory.leave()
        return self._conclude()

    def _start(self, run_dir: str, death_fd: int) -> None:
        """Start everything at once: each process waits for those that it needs."""
        launch = self._launch
        for role, index in launch.processes():
            listeners = launch.listeners if role == "api_server" else ()
            boot = ProcessBoot(
                protocol_version=PROTOCOL_VERSION,
                role=role,
                index=index,
                incarnation=0,
                epoch=_FIRST_EPOCH,
                run_dir=run_dir,
                death_fd=death_fd,
                config=launch.config,
                model=launch.model,
                listen_fds=tuple(listener.fileno() for listener in listeners),
            )
            env = child_environment(launch.variables, role, launch.config.device)
            self._running.append(Child(boot, launch.commands[role], env))

    def _watch(self, signals: SignalInbox) -> None:
        """Until the last process has ended."""
        poller = Poller(descriptors=[signals.fileno()])
        for child in self._running:
            poller.add(child.link)
            poller.add(child.pidfd)
        while self._running:
            poller.wait(self._seconds_to_sleep())
            self._notifier.beat()
            for number in signals.take():
                if number in _STOP_SIGNALS:
                    self._stop(number)
            for child in list(self._running):
                self._hear(child)
                if child.has_ended():
                    self._bury(child, poller)
            reap_adopted({child.pid for child in self._running})
            self._ending.press()

    def _seconds_to_sleep(self) -> float | None:
        """Until something must be done though nothing has happened; None for never."""
        limits = (self._ending.seconds_to_next_step(), self._notifier.seconds_to_next_beat())
        return min((each for each in limits if each is not None), default=None)

    def _hear(self, child: Child) -> None:
        for message in child.receive():
            self._handle(child, message)
        if child.last_words is not None:
            self._fail(child)

    def _handle(self, child: Child, message: Any) -> None:
        if isinstance(message, Progress):
            self._display.progress(message.what, message.fraction, child.name)
        elif isinstance(message, Notice):
            self._display.notice(message.message, child.name)
        elif isinstance(message, EngineReady | FrontEndReady):
            self._readiness.note(message)
            if self._readiness.complete and not self._ending.begun:
                assert self._readiness.engine is not None, "complete without an engine"
                self._display.close()
                self._on_ready(self._readiness.engine)

    def _bury(self, child: Child, poller: Poller) -> None:
        """A process is gone: read what it left, and see whether it was meant to go."""
        child.await_last_words()
        poller.remove(child.link)
        poller.remove(child.pidfd)
        self._running.remove(child)
        if child.exit_status != 0 or not self._ending.begun:
            self._fail(child)
        child.close()

    def _fail(self, child: Child) -> None:
        """Note a failure. The first ends the daemon; later ones are mostly its echo."""
        if child in self._failed:
            return
        now = time.monotonic()
        if not self._ending.begun:
            self._first_failure = now
            self._failed.append(child)
            self._end(AFTER_A_DEATH)
        elif self._failed and now - self._first_failure < _CHAIN_SECONDS:
            self._failed.append(child)
        elif not self._failed and not self._ending.caused(child.exit_status):
            self._display.notice(f"{obituary.manner(child)} while it was ending", child.name)

    def _stop(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._ending.begun and now - self._stopped_at > _SAME_SIGNAL_SECONDS:
            self._status = 128 + number
            self._ending.force()
        elif not self._ending.begun:
            self._stopped_at = now
            self._display.notice("stopping; a second signal ends everything at once")
            self._end(ON_REQUEST)

    def _end(self, patience: Patience) -> None:
        self._notifier.stopping()
        for listener in self._launch.listeners:
            listener.close()
        self._ending = Ending(self._running, patience)

    def _kill_rest(self) -> None:
        """Only an error of the supervisor itself leaves any."""
        for child in self._running:
            child.signal(signal.SIGKILL)
            child.wait()
            child.close()
        self._running.clear()

    def _conclude(self) -> int:
        if not self._failed:
            return self._status
        culprit = obituary.culprit_of(self._failed)
        message = obituary.user_error(culprit.last_words)
        if message is not None:
            print(f"tokend: {message}", file=sys.stderr, flush=True)
            return 2
        moment = "while serving" if self._readiness.complete else "while starting"
        print(obituary.render(culprit, moment), file=sys.stderr, flush=True)
        return 1
