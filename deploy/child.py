"""One process of the daemon as its parent sees it: birth, messages, end.

Knows how to start and end a process, not when.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proto.codec import Message, changed, encode
from proto.errors import ErrorInfo
from proto.lifecycle import Fatal, ProcessBoot, Role, Shutdown, ToSupervisor, process_name
from proto.sockets import Link, Poller, supervisor_path

_LAST_WORDS_SECONDS: Final = 0.5

Commands = Mapping[Role, Sequence[str]]
"""How the process of each role is started, without its boot descriptor."""


def module_commands() -> Commands:
    """The real processes. -P keeps a folder of the user's called `worker` out of it."""
    roles: tuple[Role, ...] = ("api_server", "engine_core", "worker")
    return {role: (sys.executable, "-P", "-m", role) for role in roles}


class Child:
    """A process and the link to it.

    `last_words` is the error that it reported before it ended, or None.
    """

    def __init__(self, boot: ProcessBoot, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.role = boot.role
        self.index = boot.index
        self.incarnation = boot.incarnation
        self.generation = boot.generation
        self.last_words: ErrorInfo | None = None
        self.link = Link.bind(
            supervisor_path(boot.run_dir, boot.role, boot.index, boot.incarnation), ToSupervisor
        )
        self._process = _spawn(boot, command, env)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def name(self) -> str:
        return process_name(self.role, self.index)

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative numbers are signals."""
        return self._process.returncode

    def has_ended(self) -> bool:
        """Whether it is gone; takes its exit status the first time that it is."""
        return self._process.poll() is not None

    def receive(self) -> list[Any]:
        """Messages that have arrived; a Fatal among them is kept as last words too."""
        messages = self.link.receive()
        for message in messages:
            if isinstance(message, Fatal):
                self.last_words = message.error
        return messages

    def await_last_words(self) -> None:
        """After an end with an exit status: what it said may still be on its way."""
        if self.last_words is None and (self.exit_status or 0) > 0:
            poller = Poller([self.link])
            while self.last_words is None and poller.wait(_LAST_WORDS_SECONDS):
                self.receive()

    def tell(self, message: Message) -> None:
        """Send it something."""
        self.link.send(message)

    def ask_to_end(self) -> None:
        """Send Shutdown."""
        self.tell(Shutdown())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        if not self.has_ended():
            os.killpg(self.pid, number)

    def show_stacks(self) -> None:
        """Have it write the stacks of its threads to the log, even if it was stopped.

        But a front end that was stopped stays so, and shows nothing: it would take in the
        connections that can wait for the next one.
        """
        if not self.has_ended():
            os.kill(self.pid, signal.SIGUSR1)
            if self.role != "api_server":
                self.signal(signal.SIGCONT)

    def wait(self) -> None:
        """Until the process is gone."""
        self._process.wait()

    def close(self) -> None:
        """Let go of link and descriptor; the process must have ended."""
        assert self.has_ended(), f"{self.name} still runs"
        self.link.close()
        os.close(self.pidfd)


def _spawn(
    boot: ProcessBoot, command: Sequence[str], env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    boot_fd = os.memfd_create("tokend-boot")
    memory = () if boot.metrics_fd is None else (boot.metrics_fd,)
    try:
        with os.fdopen(os.dup(boot_fd), "wb") as stream:
            stream.write(encode(changed(boot, born_at=time.monotonic())))
        return subprocess.Popen(
            [*command, "--boot-fd", str(boot_fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=(boot_fd, boot.death_fd, *boot.listen_fds, *memory),
            env=env,
            process_group=0,
        )
    finally:
        os.close(boot_fd)
