"""Epochs, incarnations and boot messages; their table is in proto/messages/lifecycle.py."""

import contextlib
import copy
import itertools
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from deploy.supervisor.processes import Child
from proto.codec import Message, changed
from proto.messages.engine_io import PauseMode
from proto.messages.lifecycle import NewEngine, NewFrontEnd, NewWorkers, ProcessBoot, Role
from proto.messages.lora import AdapterCard, AdapterList
from proto.messages.prepared_model import PreparedModel


class Announcement(NamedTuple):
    """A message, and the processes that receive it.

    engine: only those of the engine with this index; None for all of the role.
    """

    role: Role
    message: Message
    engine: int | None = None


class ServedModels(NamedTuple):
    """The model of a generation, and the one of --speculative-config that drafts for it."""

    model: PreparedModel
    draft_model: PreparedModel | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The files or folders of the models, absolute."""
        return tuple(each.source for each in self if each is not None)


class EpochCounter:
    """Numbers engines, workers and front ends of a generation, and creates their boot messages.

    Lists are by the index of an engine.

    template: boot message without role, index, numbers and listeners. Its metrics_fd is for front
        ends only.
    listen_fds, admin_fds: listening sockets of the front ends.
    epochs, worker_epochs: of each engine and of its workers.
    pause_mode: the last one that an engine has reported; a new engine starts with it.
    adapters: likewise, of the model, by name; None before an engine has reported any.
    """

    def __init__(
        self,
        template: ProcessBoot,
        listen_fds: tuple[int, ...],
        admin_fds: tuple[int, ...] = (),
    ) -> None:
        self._template = template
        self._listen_fds, self._admin_fds = listen_fds, admin_fds
        self._next_epochs = itertools.count(1)
        self._num_starts: Counter[tuple[Role, int]] = Counter()
        self._num_hangs: Counter[tuple[Role, int]] = Counter()
        self._begin_epochs()
        self.pause_mode: PauseMode | None = None
        self.adapters: dict[str, AdapterCard] | None = None

    def _begin_epochs(self) -> None:
        """Number the engines of a new generation, and their workers."""
        self.epochs = list(itertools.islice(self._next_epochs, self.num_engines))
        self.worker_epochs = self.epochs.copy()

    @property
    def epoch(self) -> int:
        """Epoch of engine 0, the only one of a daemon that reloads."""
        return self.epochs[0]

    @property
    def worker_epoch(self) -> int:
        """Epoch of the workers of engine 0."""
        return self.worker_epochs[0]

    @property
    def num_engines(self) -> int:
        return self._template.config.parallel.data_parallel_size

    @property
    def num_ranks(self) -> int:
        """Workers of each engine."""
        return self._template.config.parallel.tensor_parallel_size

    def workers_of(self, engine: int) -> range:
        """Return the indices of the workers of an engine, by rank."""
        return range(engine * self.num_ranks, (engine + 1) * self.num_ranks)

    def engine_of(self, role: Role, epoch: int) -> int | None:
        """Return the engine whose epoch, or whose workers' epoch, this is; None: an earlier one."""
        epochs = self.worker_epochs if role == "worker" else self.epochs
        return epochs.index(epoch) if epoch in epochs else None

    @property
    def generation(self) -> int:
        """Generation of the current engines and workers."""
        return self._template.generation

    def is_current(self, process: Child) -> bool:
        """Whether a process belongs to the current generation; a front end always does."""
        return process.role == "api_server" or process.generation == self.generation

    @property
    def models(self) -> ServedModels:
        return ServedModels(self._template.model, self._template.draft_model)

    def next_generation(self, models: ServedModels) -> "EpochCounter":
        """Return a counter for a new generation, with new epochs and the same incarnations."""
        other = self.snapshot()
        if models.model.source != self._template.model.source:
            other.adapters = None
        other._begin_epochs()
        config = self._template.config
        other._template = changed(
            self._template,
            model=models.model.served_with(config.media.max_images, config.model.max_model_len),
            draft_model=models.draft_model,
            generation=other.epochs[0],
        )
        return other

    def snapshot(self) -> "EpochCounter":
        """Return a copy, which keeps the present numbers after `switch_to`."""
        other = copy.copy(self)
        other.epochs, other.worker_epochs = self.epochs.copy(), self.worker_epochs.copy()
        other.adapters = None if self.adapters is None else dict(self.adapters)
        return other

    def switch_to(self, other: "EpochCounter") -> None:
        """Make another generation the current one."""
        self.epochs, self.worker_epochs = other.epochs, other.worker_epochs
        self.adapters = other.adapters
        self._template = other._template

    def note_adapters(self, message: AdapterList) -> None:
        """Note the adapters of an engine of this generation."""
        if message.epoch >= self.generation:
            self.adopt_adapters(message)

    def adopt_adapters(self, message: AdapterList) -> None:
        """Have later engines start with the adapters of an engine of any generation."""
        if self.adapters is None:
            self.adapters = {}
        message.apply_to(self.adapters)

    def make_boot(self, role: Role, index: int, *, hung: bool = False) -> ProcessBoot:
        """Return the boot message of the next incarnation of a process, in the current epochs.

        hung: whether its predecessor was killed because it hung.
        """
        incarnation = self._num_starts[role, index]
        self._num_starts[role, index] += 1
        self._num_hangs[role, index] += hung
        is_front_end = role == "api_server"
        count = self._template.config.frontend.api_server_count
        num_starts = [self._num_starts["api_server", other] for other in range(count)]
        boot = changed(self._template, role=role, index=index)
        return changed(
            boot,
            incarnation=incarnation,
            num_hung=self._num_hangs[role, index],
            epoch=self.epochs[boot.engine],
            worker_epoch=self.worker_epochs[boot.engine],
            engine_epochs=tuple(self.epochs),
            listen_fds=self._listen_fds if is_front_end else (),
            admin_fds=self._admin_fds if is_front_end else (),
            metrics_fd=self._template.metrics_fd if is_front_end else None,
            front_ends=tuple(max(0, number - 1) for number in num_starts),
            pause_mode=self.pause_mode,
            adapters=None if self.adapters is None else tuple(self.adapters.values()),
        )

    def new_engine(self, engine: int) -> list[Announcement]:
        """Assign the epochs of an engine that will replace a dead one; return the announcements."""
        self.remove_sockets(self.epochs[engine])
        self.remove_sockets(self.worker_epochs[engine])
        epoch = self.epochs[engine] = self.worker_epochs[engine] = next(self._next_epochs)
        message = NewEngine(epoch, epoch, engine=engine)
        return [Announcement("worker", message, engine), Announcement("api_server", message)]

    def new_workers(self, engine: int) -> list[Announcement]:
        """Assign the epoch of workers that will replace dead ones; return the announcement."""
        epoch = self.worker_epochs[engine] = next(self._next_epochs)
        return [Announcement("engine_core", NewWorkers(epoch), engine)]

    def new_front_end(self, index: int) -> list[Announcement]:
        """Return the announcement of a front end that will replace a dead one."""
        message = NewFrontEnd(index, self._num_starts["api_server", index])
        return [Announcement("engine_core", message)]

    def remove_sockets(self, epoch: int) -> None:
        """Remove the socket files that an engine of this epoch has left."""
        for path in Path(self._template.run_dir).glob(f"e{epoch}.*"):
            with contextlib.suppress(OSError):
                path.unlink()
