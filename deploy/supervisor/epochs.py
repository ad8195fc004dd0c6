"""Epochs, incarnations and boot messages of all processes; see the table in proto/lifecycle.py."""

import contextlib
import copy
import itertools
from collections import Counter
from pathlib import Path

from deploy.supervisor.processes import Child
from proto.codec import Message, changed
from proto.engine_io import PauseMode
from proto.lifecycle import NewEngine, NewFrontEnd, NewWorkers, ProcessBoot, Role
from proto.prepared_model import PreparedModel

Announcement = tuple[Role, Message]
"""A message, and the role of the processes that receive it."""


class EpochCounter:
    """Numbers the engines, workers and API servers of one generation, and makes boot messages.

    template: boot message without role, index, numbers and listeners. Its metrics_fd is for API
        servers only.
    listen_fds: listening sockets of the API servers.
    pause_mode: last mode that the engine reported; a new engine starts with it.
    """

    def __init__(self, template: ProcessBoot, listen_fds: tuple[int, ...]) -> None:
        self._template = template
        self._listen_fds = listen_fds
        self._epochs = itertools.count(2)
        self._lives: Counter[tuple[Role, int]] = Counter()
        self._hangs: Counter[tuple[Role, int]] = Counter()
        self.epoch = self.worker_epoch = 1
        self.pause_mode: PauseMode | None = None

    @property
    def generation(self) -> int:
        """Generation of the engine and the workers that serve now."""
        return self._template.generation

    def is_of_now(self, process: Child) -> bool:
        """Whether a process belongs to the current generation; an API server always does."""
        return process.role == "api_server" or process.generation == self.generation

    @property
    def model(self) -> PreparedModel:
        return self._template.model

    def sibling(self, model: PreparedModel) -> "EpochCounter":
        """Return a counter for a new generation, with new epochs and the same incarnations."""
        other = copy.copy(self)
        other.epoch = other.worker_epoch = next(self._epochs)
        other._template = changed(self._template, model=model, generation=other.epoch)
        return other

    def as_it_is(self) -> "EpochCounter":
        """The present numbers, to be kept when others are adopted."""
        return copy.copy(self)

    def adopt(self, other: "EpochCounter") -> None:
        """From now on the other generation is the one that counts."""
        self.epoch, self.worker_epoch = other.epoch, other.worker_epoch
        self._template = other._template

    def boot(self, role: Role, index: int, *, hung: bool = False) -> ProcessBoot:
        """The boot message of a process that is about to start, in the present epochs.

        hung: its last life ended by force.
        """
        incarnation = self._lives[role, index]
        self._lives[role, index] += 1
        self._hangs[role, index] += hung
        is_front_end = role == "api_server"
        count = self._template.config.frontend.api_server_count
        lives = [self._lives["api_server", each] for each in range(count)]
        return changed(
            self._template,
            role=role,
            index=index,
            incarnation=incarnation,
            num_hung=self._hangs[role, index],
            epoch=self.epoch,
            worker_epoch=self.worker_epoch,
            listen_fds=self._listen_fds if is_front_end else (),
            metrics_fd=self._template.metrics_fd if is_front_end else None,
            front_ends=tuple(max(0, each - 1) for each in lives),
            pause_mode=self.pause_mode,
        )

    def new_engine(self) -> list[Announcement]:
        """An engine is about to start in the place of one that died."""
        self.remove_sockets(self.epoch)
        self.remove_sockets(self.worker_epoch)
        self.epoch = self.worker_epoch = next(self._epochs)
        message = NewEngine(self.epoch, self.worker_epoch)
        return [("worker", message), ("api_server", message)]

    def new_workers(self) -> list[Announcement]:
        """Workers are about to start in the place of those that died."""
        self.worker_epoch = next(self._epochs)
        return [("engine_core", NewWorkers(self.worker_epoch))]

    def new_front_end(self, index: int) -> list[Announcement]:
        """A front end is about to start in the place of one that died."""
        return [("engine_core", NewFrontEnd(index, self._lives["api_server", index]))]

    def remove_sockets(self, epoch: int) -> None:
        """What an engine has bound stays behind as a file."""
        for path in Path(self._template.run_dir).glob(f"e{epoch}.*"):
            with contextlib.suppress(OSError):
                path.unlink()
