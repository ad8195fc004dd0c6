"""What each process is given at birth, and what the others are told of it.

Owns the epochs and the incarnations: which life of which process this is. Starts nothing.
"""

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
"""Who is to be told, and what."""


class EpochCounter:
    """Counts lives.

    template: a boot message, complete but for role, index, numbers and listeners. Its
        metrics_fd is for front ends only.
    listen_fds: what front ends listen on.
    pause_mode: what the engine said last of itself; the next one goes on with it.
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
        """Of the engine and the workers that are born now."""
        return self._template.generation

    def is_of_now(self, process: Child) -> bool:
        """Neither of a generation that comes nor of one that goes; front ends are of all."""
        return process.role == "api_server" or process.generation == self.generation

    @property
    def model(self) -> PreparedModel:
        return self._template.model

    def sibling(self, model: PreparedModel) -> "EpochCounter":
        """Those of another generation, in epochs of its own; lives are counted together."""
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
