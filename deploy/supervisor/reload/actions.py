"""Preparing the model for a reload, and the memory that a second generation needs."""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.models import gguf_parts
from deploy.supervisor.epochs import ServedModels
from deploy.supervisor.launch import Launch, Readiness, check_length
from deploy.supervisor.processes import ChildProcesses
from proto.codec import from_json
from proto.errors import ConfigError, ModelError, ProtocolError
from proto.messages.prepared_model import PreparedModel
from proto.runtime.host_resources import available_memory, resident_memory
from proto.runtime.sockets import Poller
from proto.settings.config import DEFAULT_POOL_SHARE


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

    source: the served model as it was given. root: holds the `proc` and `sys` trees that describe
    the machine.
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
        self.source = launch.config.model.model
        self._revision = launch.config.model.revision

    def start_preparation(self, model: str | None) -> PreparationProcess:
        """Start a process that prepares a model; the main loop waits for its end.

        model: as on the command line of the daemon; None for the one that is served.
        """
        launch = self._launch
        command = [*launch.prepare_command, model or self.source]
        if model is None and self._revision is not None:
            command += ["--revision", self._revision]
        if (text := launch.config.speculation.speculative_config) is not None:
            command += ["--speculative-config", text]
        preparation = PreparationProcess(command, launch.variables)
        self._poller.add(preparation.fileno())
        self._children.preparing_pids.add(preparation.pid)
        return preparation

    def end_preparation(self, preparation: PreparationProcess) -> None:
        self._poller.remove(preparation.fileno())
        self._children.preparing_pids.discard(preparation.pid)
        preparation.close()

    def check_model(self, old: PreparedModel, new: PreparedModel) -> None:
        """Raise ModelError if the daemon's flags do not go with the model that follows."""
        config = self._launch.config
        try:
            check_length(config, new)
        except ConfigError as error:
            raise ModelError(str(error)) from None
        if new.source == old.source:
            return
        for flag, value in (
            ("--tokenizer", config.model.tokenizer),
            ("--chat-template", config.model.chat_template),
        ):
            if value is not None:
                raise ModelError(
                    f"{flag} {value} belongs to {old.name}: another model needs a restart"
                )

    def is_unchanged(self, old: ServedModels, new: ServedModels) -> bool:
        """Whether two models are the same files as they were, tokenizer and template included.

        Another file of a flag is not found, so those of flags always count as changed.
        """
        model = self._launch.config.model
        return old.folders == new.folders and (model.tokenizer, model.chat_template) == (None, None)

    def served_name(self, model: PreparedModel) -> str:
        """Return the name of a model in the API."""
        return self._launch.config.model.served_names(model.name)[0]

    def note_reloaded(self, model: str | None) -> None:
        """Remember the model that the next reload prepares; None for the same one."""
        if model is not None:
            self.source, self._revision = model, None

    def two_generations_fit(self, old: PreparedModel, new: PreparedModel) -> bool:
        """Whether a second generation of an engine can run beside the current one.

        On a CPU, free memory must be at least what workers and KV pool of one engine use now, and
        more if the files of another model are larger. A pool whose size is not set takes a share of
        what is free then; it must not be smaller than half of the current one. Always False on a
        GPU, whose free memory is unknown here, and with a fixed endpoint for KV events.
        """
        config = self._launch.config
        cache = config.cache
        if config.device.device == "cuda" or cache.has_fixed_kv_events_endpoint:
            return False
        pool = self._readiness.engine.kv_cache_bytes
        pools = pool if cache.pool_setting else int(pool / 2 / DEFAULT_POOL_SHARE)
        workers = [child.pid for child in self._children.running if child.role == "worker"]
        memory = sum(resident_memory(pid, self._root) for pid in workers)
        memory //= config.parallel.data_parallel_size
        if new.source != old.source:
            memory = int(memory * max(1.0, _num_bytes(new.source) / max(1, _num_bytes(old.source))))
        return available_memory(self._root) >= pools + memory


def _num_bytes(source: str) -> int:
    """Return the size of the files with a model's weights; 0 if they are gone."""
    with contextlib.suppress(OSError):
        if not os.path.isdir(source):
            return sum(map(os.path.getsize, gguf_parts.part_paths(source)))
        weights = (".safetensors", ".bin", ".gguf")
        return sum(
            entry.stat().st_size for entry in os.scandir(source) if entry.name.endswith(weights)
        )
    return 0
