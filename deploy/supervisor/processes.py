"""Child processes of the supervisor: environment, start, messages, signals, exit.

`Child` is one process, `ChildProcesses` all that run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

from deploy.supervisor.launch import Commands, Launch
from proto.codec import Message, changed, encode
from proto.errors import ErrorInfo, TokendError
from proto.messages.lifecycle import (
    Fatal,
    Prepared,
    ProcessBoot,
    Role,
    Shutdown,
    TakePlace,
    ToSupervisor,
)
from proto.runtime.host_resources import (
    allowed_cores,
    cores_by_node,
    cores_of_worker,
    node_of_worker,
)
from proto.runtime.sockets import Link, Poller, SocketError, supervisor_path
from proto.settings.config import DeviceConfig

_THREADS: Final = "OMP_NUM_THREADS"
_SPIN: Final = {"GOMP_SPINCOUNT": "4000"}
"""How long an idle thread of OpenMP spins before it sleeps: about 80 microseconds, the time between
two operations, and much less than a scheduler tick."""
_PLACING: Final = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
_LIBRARY_LIMITS: Final = {
    "amx": ("AVX512_CORE_AMX", "avx512", "AVX512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "avx512", "AVX512"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx2_vnni": ("AVX2_VNNI", "avx2", "AVX2"),
    "avx2": ("AVX2", "avx2", "AVX2"),
    "baseline": ("SSE41", "default", "SSE4_2"),
}
"""Value of --cpu-kernels → highest instruction set of oneDNN, of torch's own kernels and of MKL."""
_LIMIT_VARIABLES: Final = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
_NVIDIA_DRIVER: Final = "/dev/nvidiactl"


def child_environment(
    variables: Mapping[str, str],
    role: Role,
    device: DeviceConfig,
    num_workers: int = 1,
    index: int = 0,
) -> dict[str, str]:
    """Return the environment variables of a process of this role and index.

    num_workers: of all engines of the daemon.

    OpenMP reads its thread count when its library loads, so a worker inherits it: --cpu-threads,
    or the user's environment, or its share of the cores that affinity and control groups allow.
    Idle threads spin for a moment and then sleep: longer spinning saves milliseconds per step on
    an idle machine, and costs ten times as much when another program uses the cores (figures in
    docs/benchmarks/threads-and-start.md). With one thread per core each is bound to its core,
    because two on one core would wait for each other at every barrier. On a machine with several
    memory nodes neighbouring threads are on one node, and each of several workers is bound to a
    node if it fits there (worker/host/memory_nodes.py). The user's environment overrides that.
    In other processes numpy gets a single thread. The libraries behind torch read the instruction
    sets that --cpu-kernels leaves them when they load, too.
    """
    if role != "worker":
        return {**variables, _THREADS: "1", "OPENBLAS_NUM_THREADS": "1"}
    spin = {} if "OMP_WAIT_POLICY" in variables else _SPIN
    given = {_THREADS: str(cores_of_worker(num_workers)), **spin, **variables}
    if device.cpu_threads is not None:
        given[_THREADS] = str(device.cpu_threads)
    if device.cpu_kernels != "auto":
        given |= zip(_LIMIT_VARIABLES, _LIBRARY_LIMITS[device.cpu_kernels], strict=True)
    if not computes_on_cpu(device) or _PLACING & variables.keys():
        return given  # threads of a GPU worker are not bound to cores
    places = _openmp_places(given[_THREADS], num_workers, index)
    return {**given, "OMP_PROC_BIND": "true", "OMP_PLACES": places} if places else given


def _openmp_places(num_threads: str, num_workers: int, index: int) -> str:
    """Return the CPUs to which the threads of a worker are bound; "" if they are not bound."""
    nodes = cores_by_node()
    if num_threads == str(allowed_cores()):
        if len(nodes) < 2:
            return "cores"
        return ",".join(_place(core) for cores in nodes.values() for core in cores)
    if num_workers == 1 or not num_threads.isdigit():
        return ""
    node = node_of_worker(index, num_workers, int(num_threads))
    return "" if node is None else _place(chain.from_iterable(nodes[node]))


def _place(cpus: Iterable[int]) -> str:
    return f"{{{','.join(map(str, sorted(cpus)))}}}"


def computes_on_cpu(device: DeviceConfig) -> bool:
    """Whether the worker computes on the CPU, as far as this process can tell without torch."""
    return device.device in ("cpu", "reference") or (
        device.device == "auto" and not os.path.exists(_NVIDIA_DRIVER)
    )


_START_TIME: Final = 19
"""Index of the field after the process name; see proc(5)."""


def process_age(pid: int | Literal["self"] = "self") -> float:
    """Return the seconds since a process was started, in steps of 0.01; 0 if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def reap_adopted(ours: Container[int]) -> None:
    """Reap ended children that this process did not start; `ours` are the ids of the others.

    As process 1 of a container the supervisor inherits orphans, and each unread exit status keeps
    an entry in the process table. The kernel shows one ended child at a time, so one of `ours`
    hides others until its status has been read.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in ours:
                return
            os.waitpid(ended.si_pid, 0)


_FATAL_ERROR_SECONDS: Final = 0.5
_NUM_SPARE_DESCRIPTORS: Final = 4
"""More than the one that an accepted connection takes: pidfds and threads open some, too."""


def module_commands() -> Commands:
    """Return the commands of the real processes. -P keeps the current folder out of sys.path."""
    roles: tuple[Role, ...] = ("api_server", "engine_core", "worker")
    return {role: (sys.executable, "-P", "-m", role) for role in roles}


class StartError(TokendError):
    """The operating system could not start a process. reason: what it lacks."""

    def __init__(self, boot: ProcessBoot, reason: str) -> None:
        super().__init__(f"{boot.name} cannot be started: {reason}")
        self.reason = reason


class Child:
    """A child process and the link to it.

    has_place: whether it serves; else it is a standby process. is_prepared: whether it has done
        what it needs no place for.
    engine: its index, or that of the workers' engine; None for a front end or a standby process.
    fatal_error: the error that it has reported, or None.
    """

    def __init__(self, boot: ProcessBoot, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Raises StartError."""
        self.role = boot.role
        self.weights_generation = boot.weights_generation
        self.is_prepared = False
        self.fatal_error: ErrorInfo | None = None
        self._note_boot(boot)
        self._surroundings = _surroundings(boot, env)
        path = supervisor_path(
            boot.run_dir, boot.role, boot.index, boot.incarnation, has_place=boot.has_place
        )
        try:
            with contextlib.ExitStack() as undo, _spare_descriptors():
                self.link = Link.bind(path, ToSupervisor)
                undo.callback(self.link.close)
                self._process = _spawn(boot, command, env)
                undo.callback(self._process.wait)
                undo.callback(self._process.kill)
                self.pid = self._process.pid
                self.pidfd = os.pidfd_open(self.pid)
                undo.pop_all()
        except (OSError, SocketError) as error:
            # The text of a ZMQ error ends with an address, which means nothing to a reader
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StartError(boot, reason) from None

    def _note_boot(self, boot: ProcessBoot) -> None:
        self.name = boot.name
        self.has_place = boot.has_place
        self.index = boot.index
        self.engine = None if boot.role == "api_server" or not boot.has_place else boot.engine
        self.incarnation = boot.incarnation
        self.generation = boot.generation

    def can_take_place(self, boot: ProcessBoot, env: Mapping[str, str]) -> bool:
        """Whether it is ready to run as the process that `boot` names. env: of such a process."""
        is_ready = self.is_prepared and not self.has_ended()
        return is_ready and self._surroundings == _surroundings(boot, env)

    def take_place(self, boot: ProcessBoot) -> None:
        """Have it run as the process that `boot` names."""
        self._note_boot(boot)
        self.send(TakePlace(boot))

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative numbers are signals."""
        return self._process.returncode

    def has_ended(self) -> bool:
        """Whether the process has ended; reads its exit status."""
        return self._process.poll() is not None

    def receive(self) -> list[Any]:
        """Return the messages that have arrived; the error of a Fatal is kept as `fatal_error`."""
        messages = self.link.receive()
        for message in messages:
            if isinstance(message, Fatal):
                self.fatal_error = message.error
            elif isinstance(message, Prepared):
                self.is_prepared = True
        return messages

    def await_fatal_error(self) -> None:
        """After a failure, wait a moment for its Fatal message, which may still be in transit."""
        if self.fatal_error is None and (self.exit_status or 0) > 0:
            poller = Poller([self.link])
            while self.fatal_error is None and poller.wait(_FATAL_ERROR_SECONDS):
                self.receive()

    def send(self, message: Message) -> None:
        self.link.send(message)

    def request_shutdown(self) -> None:
        self.send(Shutdown())

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group."""
        if not self.has_ended():
            os.killpg(self.pid, number)

    def dump_stacks(self) -> None:
        """Make the process write the stacks of its threads to the log, even if it is stopped.

        A stopped front end is not continued and writes nothing: it would accept connections that
        should go to its successor.
        """
        if not self.has_ended():
            os.kill(self.pid, signal.SIGUSR1)
            if self.role != "api_server":
                self.send_signal(signal.SIGCONT)

    def wait(self) -> None:
        self._process.wait()

    def close(self) -> None:
        """Close link and descriptor; the process must have ended."""
        assert self.has_ended(), f"{self.name} still runs"
        self.link.close()
        os.close(self.pidfd)


class WeightFiles:
    """The files in memory in which workers lay out packed weights for others and for successors.

    Workers share one that have the same weights_generation (see ProcessBoot), rank and memory node.
    It has no name: workers inherit its descriptor, and the kernel frees it with the last process
    that has it. worker/host/shared_weights.py fills it.
    """

    def __init__(self) -> None:
        self._descriptors: dict[tuple[int, int, int | None], int] = {}

    def descriptor(self, generation: int, rank: int, node: int | None) -> int:
        """Return the file for a worker, a new one if it is the first. Raises OSError.

        node: the memory node that all its threads are bound to; None if they are bound to none.
        """
        key = (generation, rank, node)
        if key not in self._descriptors:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._descriptors[key] = os.memfd_create("tokend-weights", flags)
        return self._descriptors[key]

    def close(self, but: Collection[int] = ()) -> None:
        """Close all files but those of some generations."""
        for key in list(self._descriptors):
            if key[0] not in but:
                os.close(self._descriptors.pop(key))


class ChildProcesses:
    """All child processes that run.

    running, standby: those with a place and without; may change while the main loop iterates over a
        copy.
    preparing_pids: processes that prepare a model for a reload, which are not `Child`s.
    weight_files: of the workers that run, and of those that are restarted.
    """

    def __init__(self, launch: Launch, poller: Poller) -> None:
        self._launch = launch
        self._poller = poller
        self.weight_files = WeightFiles()
        self.running: list[Child] = []
        self.standby: list[Child] = []
        self.preparing_pids: set[int] = set()

    def start(self, boot: ProcessBoot) -> Child:
        """Have a standby process take a place, or start one. Raises StartError."""
        boot, env = self._with_surroundings(boot)
        ready = (child for child in self.standby if child.can_take_place(boot, env))
        if (child := next(ready, None)) is None:
            child = self._spawn(boot, env)
        else:
            self.standby.remove(child)
        child.take_place(boot)
        self.running.append(child)
        return child

    def start_standby(self, boot: ProcessBoot) -> None:
        """Start a process that prepares itself and waits for a place. Raises StartError."""
        self.standby.append(self._spawn(*self._with_surroundings(boot)))

    def _spawn(self, boot: ProcessBoot, env: Mapping[str, str]) -> Child:
        """Start a process and poll its link and its exit."""
        child = Child(boot, self._launch.commands[boot.role], env)
        self._poller.add(child.link)
        self._poller.add(child.pidfd)
        return child

    def _with_surroundings(self, boot: ProcessBoot) -> tuple[ProcessBoot, dict[str, str]]:
        """Return the boot message with all descriptors, and the environment of the process."""
        config = self._launch.config
        num_workers = config.parallel.num_workers
        index = boot.index % num_workers if boot.role == "worker" else boot.index
        env = child_environment(
            self._launch.variables, boot.role, config.device, num_workers, index
        )
        boot = changed(boot, born_at=time.monotonic())
        if boot.role == "worker":
            boot = changed(boot, weights_fd=self._weights_descriptor(boot, index, env[_THREADS]))
        return boot, env

    def _weights_descriptor(self, boot: ProcessBoot, index: int, num_threads: str) -> int:
        """Return the file for the packed weights of a worker. Raises StartError."""
        node, num_workers = None, boot.config.parallel.num_workers
        if num_threads.isdigit():
            node = node_of_worker(index, num_workers, int(num_threads))
        try:
            return self.weight_files.descriptor(boot.weights_generation, boot.rank, node)
        except OSError as error:
            raise StartError(boot, os.strerror(error.errno or 0)) from None

    def remove(self, child: Child) -> None:
        self._poller.remove(child.link)
        self._poller.remove(child.pidfd)
        (self.running if child.has_place else self.standby).remove(child)

    def front_ends(self) -> list[Child]:
        return [child for child in self.running if child.role == "api_server"]

    def close_weight_files(self, current: int) -> None:
        """Close the files of weights that no worker has; current: that later workers have."""
        of_workers = {each.weights_generation for each in self.running if each.role == "worker"}
        self.weight_files.close(but={current, *of_workers})

    def of_generation(self, generation: int) -> list[Child]:
        """Return the engine and the workers of a generation."""
        return [
            child
            for child in self.running
            if child.role != "api_server" and child.generation == generation
        ]

    def send_to_front_ends(self, message: Message) -> None:
        for child in self.front_ends():
            child.send(message)

    def all_pids(self) -> set[int]:
        return {child.pid for child in (*self.running, *self.standby)} | self.preparing_pids

    def kill_all(self) -> None:
        for child in (*self.running, *self.standby):
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.close()
        self.running.clear()
        self.standby.clear()
        self.weight_files.close()


@contextlib.contextmanager
def _spare_descriptors() -> Iterator[None]:
    """Hold some descriptors in the block, so that they are free after it. Raises OSError.

    A child that was started with the last free descriptor could not be accepted on its link, and
    libzmq ends the whole process when `accept` fails for lack of one.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(_NUM_SPARE_DESCRIPTORS):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield


def _surroundings(boot: ProcessBoot, env: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a process has from its start on: two with the same can take the same places."""
    weights = None if boot.weights_fd is None else (boot.weights_fd, boot.weights_generation)
    return boot.role, dict(env), weights


def _spawn(
    boot: ProcessBoot, command: Sequence[str], env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    boot_fd = os.memfd_create("tokend-boot")
    memory = [each for each in (boot.metrics_fd, boot.weights_fd) if each is not None]
    try:
        with os.fdopen(os.dup(boot_fd), "wb") as stream:
            stream.write(encode(boot))
        return subprocess.Popen(
            [*command, "--boot-fd", str(boot_fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=(boot_fd, boot.death_fd, *boot.listen_fds, *boot.admin_fds, *memory),
            env=env,
            process_group=0,
        )
    finally:
        os.close(boot_fd)
