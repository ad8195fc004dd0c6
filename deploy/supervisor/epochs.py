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
from proto.messages.lifecycle import (
    NewEngine,
    NewFrontEnd,
    NewWorkers,
    ProcessBoot,
    ProtocolViolation,
    Role,
)
from proto.messages.lora import AdapterCard, AdapterList
from proto.messages.prepared_model import PreparedModel


class Announcement(NamedTuple):
    """A message, and the processes that receive it.

    engine: only those of the engine with this index; None for all of the role.
    """

    role: Role
    message: Message
    engine: int | None = None


class EngineNumbers(NamedTuple):
    """What tells an engine and its workers from others of the same index.

    engine: the index. generation: no other engine has the same.
    """

    engine: int
    generation: int
    epoch: int
    worker_epoch: int

    def owns(self, process: Child) -> bool:
        """Whether a process is this engine or one of its workers; a front end is of none."""
        return process.role != "api_server" and process.generation == self.generation

    def has_sent(self, message: Message) -> bool:
        """Whether a message reports a protocol violation by the engine or one of its workers."""
        if not isinstance(message, ProtocolViolation):
            return False
        return message.epoch == (self.worker_epoch if message.role == "worker" else self.epoch)


class ServedModels(NamedTuple):
    """The model that is served, and the one of --speculative-config that drafts for it."""

    model: PreparedModel
    draft_model: PreparedModel | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The files or folders of the models, absolute."""
        return tuple(each.source for each in self if each is not None)

    @property
    def folders(self) -> tuple[str, ...]:
        """The prepared folders; another one whenever a file of a model has changed."""
        return tuple(each.folder for each in self if each is not None)


class EpochCounter:
    """Numbers engines, workers and front ends, and creates their boot messages.

    Lists are by the index of an engine.

    template: boot message without role, index, numbers and listeners. Its metrics_fd is for front
        ends only.
    listen_fds, admin_fds: listening sockets of the front ends.
    epochs, worker_epochs: of each engine and of its workers.
    generations: of each engine with its workers.
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
        self._num_standby_starts: Counter[tuple[Role, int]] = Counter()
        self._num_hangs: Counter[tuple[Role, int]] = Counter()
        self.epochs = list(itertools.islice(self._next_epochs, self.num_engines))
        self.worker_epochs, self.generations = self.epochs.copy(), self.epochs.copy()
        self.pause_mode: PauseMode | None = None
        self.adapters: dict[str, AdapterCard] | None = None

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

    def numbers_of(self, engine: int) -> EngineNumbers:
        """Return the numbers that an engine and its workers have now."""
        generation, epoch = self.generations[engine], self.epochs[engine]
        return EngineNumbers(engine, generation, epoch, self.worker_epochs[engine])

    def is_current(self, process: Child) -> bool:
        """Whether a process is of the current generation of its engine, or a front end."""
        engine = process.engine
        return engine is None or process.generation == self.generations[engine]

    @property
    def models(self) -> ServedModels:
        return ServedModels(self._template.model, self._template.draft_model)

    @property
    def weights_generation(self) -> int:
        """The first generation with the weights that processes load which start now."""
        return self._template.weights_generation

    def next_generation(
        self, models: ServedModels, engine: int, *, is_first: bool
    ) -> "EpochCounter":
        """Return a counter with a new generation of one engine, and the same incarnations.

        is_first: of those of a reload, which share the memory of their weights.
        """
        other = copy.copy(self)
        other.epochs, other.worker_epochs = self.epochs.copy(), self.worker_epochs.copy()
        other.generations = self.generations.copy()
        other.adapters = None if self.adapters is None else dict(self.adapters)
        if models.model.source != self._template.model.source:
            other.adapters = None
        other.begin_generation(engine)
        config = self._template.config
        other._template = changed(
            self._template,
            model=models.model.served_with(config.media.max_images, config.model.max_model_len),
            draft_model=models.draft_model,
            weights_generation=(
                other.generations[engine] if is_first else self._template.weights_generation
            ),
        )
        return other

    def begin_generation(self, engine: int) -> EngineNumbers:
        """Number the next engine in a place, and its workers; return the numbers of the old ones.

        Those belong to no current generation from now on.
        """
        old, epoch = self.numbers_of(engine), next(self._next_epochs)
        self.epochs[engine] = self.worker_epochs[engine] = self.generations[engine] = epoch
        return old

    def switch_to(self, other: "EpochCounter", engine: int) -> EngineNumbers:
        """Make another generation of an engine the current one; return the numbers of the old one.

        Processes that start from now on have the models of that generation.
        """
        old = self.numbers_of(engine)
        _, self.generations[engine], self.epochs[engine], self.worker_epochs[engine] = (
            other.numbers_of(engine)
        )
        self.adapters = other.adapters
        self._template = other._template
        return old

    def note_adapters(self, message: AdapterList) -> None:
        """Note the adapters of an engine, unless it is older than all current generations."""
        if message.epoch >= min(self.generations):
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
            generation=self.generations[boot.engine],
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

    def make_standby_boot(self, role: Role, index: int) -> ProcessBoot:
        """Return the first boot message of a standby process, which has no place yet.

        index: among the standby processes of this role.
        """
        incarnation = self._num_standby_starts[role, index]
        self._num_standby_starts[role, index] += 1
        return changed(
            self._template, role=role, index=index, incarnation=incarnation, metrics_fd=None
        )

    def new_engine(self, engine: int) -> list[Announcement]:
        """Assign the epochs of an engine that will replace a dead one; return the announcements."""
        self.remove_sockets(self.epochs[engine], self.worker_epochs[engine])
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

    def remove_sockets(self, *epochs: int) -> None:
        """Remove the socket files that engines and workers of these epochs have left."""
        for epoch in epochs:
            for path in Path(self._template.run_dir).glob(f"e{epoch}.*"):
                with contextlib.suppress(OSError):
                    path.unlink()
