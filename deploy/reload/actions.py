"""Operations on the daemon's processes that a reload needs."""

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
            self._forget()
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._pidfd

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> PreparedModel:
        """Return the manifest once the process has ended; raises ModelError with its message."""
        if self._process.returncode != 0:
            lines = _content(self._errors).decode(errors="replace").strip().splitlines()
            raise ModelError(lines[-1].removeprefix("tokend: ") if lines else self._manner())
        try:
            return from_json(_content(self._output), PreparedModel)
        except ProtocolError as error:
            raise ModelError(f"preparing the model printed no manifest: {error}") from None

    def close(self) -> None:
        """Kill the process if it still runs, and close its descriptors."""
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
    """What a reload does with processes.

    running: the supervisor's list of children. start: starts a child.
    command: prepares the model and prints the manifest. variables: its environment.
    engine: returns the EngineReady of the current engine. preparing: ids of the processes that
    prepare the model, filled here.
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
        """Whether a second generation fits beside the current one.

        On a CPU, free memory must be at least what workers and KV pool use now, and twice the
        pool if its size is not set, because it then takes half of the free memory and should not
        become smaller. Always False on a GPU, whose free memory is unknown here, and with a fixed
        endpoint for KV events.
        """
        cache = self._config.cache
        if self._config.device.device == "cuda" or cache.has_fixed_kv_events_endpoint:
            return False
        is_set = cache.kv_cache_memory is not None or cache.num_gpu_blocks_override is not None
        workers = [child.pid for child in self._running if child.role == "worker"]
        pools = self._engine().kv_cache_bytes * (1 if is_set else 2)
        needed = pools + sum(resident_memory(pid, self._root) for pid in workers)
        return available_memory(self._root) >= needed
