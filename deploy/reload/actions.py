"""What a reload needs done, done to the processes of this daemon.

Owns nothing: the supervisor's children, its loop and the memory of the machine are others'.
"""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.supervisor.processes import Child
from proto.codec import Message, from_json
from proto.config import ServeConfig
from proto.errors import ModelError, ProtocolError
from proto.host_resources import available_memory, resident_memory
from proto.lifecycle import EngineReady, ProcessBoot
from proto.prepared_model import PreparedModel
from proto.sockets import Poller

# The model is looked at once more while it is served: `tokend prepare` in a process of its own.
#
# Owns that process. It may take minutes, and the supervisor's loop must go on turning.


class PreparationProcess:
    """One run of `command`; `fileno()` turns readable when it is over.

    What it prints goes into memory: a pipe would fill up, or be held open by whoever it
    has started itself.
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
            self._forget()
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._pidfd

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> PreparedModel:
        """Of one that has ended; raises ModelError with its last line."""
        if self._process.returncode != 0:
            lines = _content(self._errors).decode(errors="replace").strip().splitlines()
            raise ModelError(lines[-1].removeprefix("tokend: ") if lines else self._manner())
        try:
            return from_json(_content(self._output), PreparedModel)
        except ProtocolError as error:
            raise ModelError(f"preparing the model printed no manifest: {error}") from None

    def close(self) -> None:
        """End it if it still runs, and let go of it."""
        if not self.has_ended():
            self._process.kill()
            self._process.wait()
        os.close(self._pidfd)
        self._forget()

    def _manner(self) -> str:
        return f"preparing the model ended with exit status {self._process.returncode}"

    def _forget(self) -> None:
        for descriptor in (self._output, self._errors):
            os.close(descriptor)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class ProcessActions:
    """running: the supervisor's list of children. start: how it starts one.

    command: prints the manifest of the model. variables: its environment.
    engine: what the engine of now told of itself. preparing: gets the ids of processes that
    prepare the model.
    """

    def __init__(
        self,
        running: Sequence[Child],
        start: Callable[[ProcessBoot], None],
        poller: Poller,
        config: ServeConfig,
        command: Sequence[str],
        variables: Mapping[str, str],
        engine: Callable[[], EngineReady],
        preparing: set[int],
        root: Path = Path("/"),
    ) -> None:
        self._running = running
        self.start = start
        self._poller = poller
        self._config = config
        self._command = command
        self._variables = variables
        self._engine = engine
        self._root = root
        self._preparing = preparing

    def prepare(self) -> PreparationProcess:
        preparation = PreparationProcess(self._command, self._variables)
        self._poller.add(preparation.fileno())
        self._preparing.add(preparation.pid)
        return preparation

    def let_go(self, preparation: PreparationProcess) -> None:
        self._poller.remove(preparation.fileno())
        self._preparing.discard(preparation.pid)
        preparation.close()

    def members(self, generation: int) -> list[Child]:
        return [
            child
            for child in self._running
            if child.role != "api_server" and child.generation == generation
        ]

    def tell_front_ends(self, message: Message) -> None:
        for child in self._running:
            if child.role == "api_server":
                child.tell(message)

    def fits(self) -> bool:
        """On a CPU, where there is as much memory free as workers and KV pool take now.

        A pool whose size nobody has set takes half of what is free, and a reload should
        not make it smaller: that takes twice the pool. What a GPU has free nobody here
        knows, and two engines cannot publish at one endpoint.
        """
        cache = self._config.cache
        if self._config.device.device == "cuda" or cache.has_fixed_kv_events_endpoint:
            return False
        is_set = cache.kv_cache_memory is not None or cache.num_gpu_blocks_override is not None
        workers = [child.pid for child in self._running if child.role == "worker"]
        pools = self._engine().kv_cache_bytes * (1 if is_set else 2)
        needed = pools + sum(resident_memory(pid, self._root) for pid in workers)
        return available_memory(self._root) >= needed
