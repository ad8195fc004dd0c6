"""One process of the daemon as its parent sees it: birth, messages, end.

Knows how to start and end a process, not when.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from proto.codec import Message, changed, encode
from proto.config import DeviceConfig
from proto.errors import ErrorInfo
from proto.host_resources import allowed_cores, cores_of_worker
from proto.lifecycle import Fatal, ProcessBoot, Role, Shutdown, ToSupervisor, process_name
from proto.sockets import Link, Poller, supervisor_path

# The environment variables that each role's process gets: the one place that sets them.


_THREADS: Final = "OMP_NUM_THREADS"
_SPIN: Final = {"GOMP_SPINCOUNT": "4000"}
"""Some 80 microseconds: what lies between two operations, far less than a scheduler tick."""
_BIND: Final = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
_PLACING: Final = frozenset({*_BIND, "GOMP_CPU_AFFINITY"})
_NVIDIA_DRIVER: Final = "/dev/nvidiactl"


def child_environment(
    variables: Mapping[str, str], role: Role, device: DeviceConfig, num_workers: int = 1
) -> dict[str, str]:
    """What the process of a role inherits.

    OpenMP reads its thread count when its library loads, so a worker must be born
    with it: --cpu-threads, or else what the user's environment says, or else its share of the
    cores that this process may use by its affinity and its control groups. Its idle
    threads spin for a moment and then sleep: those that spin on win milliseconds a
    step on an idle machine, and lose tenfold as soon as anybody else wants the same
    cores; docs/benchmarks/threads-and-start.md has the figures. Where there is one for
    each core, each is bound to its own: two on one core would wait for each other at every
    barrier until the scheduler parts them. The user's environment goes before that.
    Elsewhere numpy needs no threads of its own.
    """
    if role != "worker":
        return {**variables, _THREADS: "1", "OPENBLAS_NUM_THREADS": "1"}
    spin = {} if "OMP_WAIT_POLICY" in variables else _SPIN
    given = {_THREADS: str(cores_of_worker(num_workers)), **spin, **variables}
    if device.cpu_threads is not None:
        given[_THREADS] = str(device.cpu_threads)
    if _computes_on_cpu(device) and given[_THREADS] == str(allowed_cores()):
        return given if _PLACING & variables.keys() else {**given, **_BIND}
    return given


def _computes_on_cpu(device: DeviceConfig) -> bool:
    """Of a worker that has a GPU no thread is worth a core of its own."""
    return device.device == "cpu" or (
        device.device == "auto" and not os.path.exists(_NVIDIA_DRIVER)
    )


# How long ago this process was started, Python's own start included: the kernel knows.


_START_TIME: Final = 19
"""Place of the field behind the name of the process; see proc(5)."""


def process_age() -> float:
    """Seconds, in steps of a hundredth; 0 where the kernel does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


# Reaps processes that became our children without our having started them.
#
# The kernel gives orphans to process 1, which in a container is the supervisor. Their
# exit statuses interest nobody, but each unread one keeps an entry in the process table.


def reap_adopted(ours: Container[int]) -> None:
    """Read the exit statuses of ended children that are not `ours` (process ids).

    Those of `ours` are left to whoever started them. The kernel shows one ended child
    at a time, in its own order, so one of ours hides others until its status has been read.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in ours:
                return
            os.waitpid(ended.si_pid, 0)


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
