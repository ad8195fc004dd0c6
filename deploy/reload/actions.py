"""Preparing the model for a reload, and the memory that a second generation needs."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.supervisor.epochs import ServedModels
from deploy.supervisor.launch import Launch, Readiness
from deploy.supervisor.processes import ChildProcesses
from proto.codec import from_json
from proto.config import DEFAULT_POOL_SHARE
from proto.errors import ModelError, ProtocolError
from proto.host_resources import available_memory, resident_memory
from proto.prepared_model import PreparedModel
from proto.sockets import Poller


class PreparationProcess:
    """A run of `tokend prepare`, which may take minutes; `fileno()` is readable when it has ended.

    Its output goes to memory files: a pipe could fill up, or be kept open by its own children.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._output = os.memfd_create("tokend-manifest")
        self._errors = os.memfd_create("tokend-errors")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                env=env,
                process_group=0,
            )
        except OSError:
            self._close_output()
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._pidfd

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> ServedModels:
        """Return the manifests once the process has ended; raises ModelError with its message."""
        if self._process.returncode != 0:
            lines = _read_all(self._errors).decode(errors="replace").strip().splitlines()
            raise ModelError(lines[-1].removeprefix("tokend: ") if lines else self._describe_exit())
        try:
            manifests = [line for line in _read_all(self._output).splitlines() if line] or [b""]
            return ServedModels(*(from_json(line, PreparedModel) for line in manifests[:2]))
        except ProtocolError as error:
            raise ModelError(f"preparing the model printed no manifest: {error}") from None

    def close(self) -> None:
        """Kill the process if it still runs, and close its descriptors."""
        if not self.has_ended():
            self._process.kill()
            self._process.wait()
        os.close(self._pidfd)
        self._close_output()

    def _describe_exit(self) -> str:
        return f"preparing the model ended with exit status {self._process.returncode}"

    def _close_output(self) -> None:
        for descriptor in (self._output, self._errors):
            os.close(descriptor)


def _read_all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class ReloadActions:
    """Prepares the model for a reload, and decides whether two generations fit the memory.

    root: holds the `proc` and `sys` trees that describe the machine.
    """

    def __init__(
        self,
        launch: Launch,
        children: ChildProcesses,
        poller: Poller,
        readiness: Readiness,
        root: Path = Path("/"),
    ) -> None:
        self._launch = launch
        self._children = children
        self._poller = poller
        self._readiness = readiness
        self._root = root

    def start_preparation(self) -> PreparationProcess:
        """Start a process that prepares the model; the main loop waits for its end."""
        launch = self._launch
        preparation = PreparationProcess(launch.prepare_command, launch.variables)
        self._poller.add(preparation.fileno())
        self._children.preparing_pids.add(preparation.pid)
        return preparation

    def end_preparation(self, preparation: PreparationProcess) -> None:
        self._poller.remove(preparation.fileno())
        self._children.preparing_pids.discard(preparation.pid)
        preparation.close()

    def two_generations_fit(self) -> bool:
        """Whether a second generation can run beside the current one.

        On a CPU, free memory must be at least what workers and KV pool use now. A pool whose size
        is not set takes a share of what is free then; it must not be smaller than half of the
        current one. Always False on a GPU, whose free memory is unknown here, and with a fixed
        endpoint for KV events.
        """
        config = self._launch.config
        cache = config.cache
        if config.device.device == "cuda" or cache.has_fixed_kv_events_endpoint:
            return False
        pool = self._readiness.engine.kv_cache_bytes
        pools = pool if cache.pool_setting else int(pool / 2 / DEFAULT_POOL_SHARE)
        workers = [child.pid for child in self._children.running if child.role == "worker"]
        needed = pools + sum(resident_memory(pid, self._root) for pid in workers)
        return available_memory(self._root) >= needed
