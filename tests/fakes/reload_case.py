"""A reload over fake processes, on a fake clock."""

import os
import signal
from dataclasses import dataclass, field

from deploy.supervisor.epochs import Announcement, EpochCounter, ServedModels
from deploy.supervisor.processes import ChildProcesses, WeightFiles
from deploy.supervisor.recovery import Recovery
from deploy.supervisor.reload.phases import ReloadContext
from deploy.supervisor.reload.reload import Reload
from proto import PROTOCOL_VERSION
from proto.codec import Message, changed
from proto.errors import ErrorInfo, ModelError
from proto.messages.lifecycle import (
    NextReady,
    OldEngineIdle,
    ProcessBoot,
    Role,
    Switched,
    WorkersReady,
    process_name,
)
from proto.messages.prepared_model import PreparedModel
from proto.runtime.process import describe
from proto.settings.config import FrontEndConfig, ParallelConfig, ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.notices import Notices

NEW = changed(lifecycle_messages.model(), folder="/new")


@dataclass
class Process:
    role: Role
    index: int
    generation: int
    weights_generation: int = 1
    exit_status: int | None = None
    fatal_error: ErrorInfo | None = None
    pid: int = 77
    shutdown_requested: bool = False
    signals: list[signal.Signals] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)

    @property
    def engine(self) -> int | None:
        if self.role == "api_server":
            return None
        return self.index // 2 if self.role == "worker" else self.index

    @property
    def name(self) -> str:
        return process_name(self.role, self.index)

    def request_shutdown(self) -> None:
        self.shutdown_requested = True

    def send(self, message: Message) -> None:
        self.received.append(message)

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


@dataclass
class Preparation:
    """A fake preparation of a model. outcome: None while it runs."""

    outcome: PreparedModel | ModelError | None = None

    def has_ended(self) -> bool:
        return self.outcome is not None

    def result(self) -> ServedModels:
        if isinstance(self.outcome, ModelError):
            raise self.outcome
        assert self.outcome is not None
        return ServedModels(self.outcome)


class Case:
    """A reload with fake processes: two front ends, and engines with two workers each.

    first: the epoch of the first new engine.
    """

    def __init__(self, strategy: str = "side-by-side", num_engines: int = 1) -> None:
        self.now = 1000.0
        self.first = num_engines + 1
        self.num_engines = num_engines
        config = ServeConfig(
            parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=num_engines),
            frontend=FrontEndConfig(api_server_count=2),
        )
        template = ProcessBoot(
            protocol_version=PROTOCOL_VERSION,
            role="worker",
            index=0,
            incarnation=0,
            epoch=0,
            worker_epoch=0,
            run_dir="/nowhere",
            death_fd=3,
            config=config,
            model=lifecycle_messages.model(),
        )
        self.epochs = EpochCounter(template, (9,))
        self.recovery = Recovery(self.epochs, 8, Notices(), lambda: self.now)
        self.running: list[Process] = []
        self.boots: list[ProcessBoot] = []
        self.weight_files = WeightFiles()
        self.front_ends = [Process("api_server", each, 1) for each in range(2)]
        for engine in range(num_engines):
            for index in self.epochs.workers_of(engine):
                self.start(self.epochs.make_boot("worker", index))
            self.start(self.epochs.make_boot("engine_core", engine))
        for each in range(2):
            self.epochs.make_boot("api_server", each)
        self.sent: list[Message] = []
        self.announced: list[Announcement] = []
        self.ended: list[tuple[str, bool]] = []
        self.num_new: list[int] = []
        self.reasons: list[str] = []
        self.num_begun = 0
        self.source = "model"
        self.prepared: list[str | None] = []
        self.reloaded: list[str | None] = []
        self.names: list[str] = []
        self.preparations: list[Preparation] = []
        self.has_room = True
        context = ReloadContext(
            self.epochs, self.recovery, self, self, strategy, 2, lambda: self.now
        )
        self.reload = Reload(context, self)

    # ProcessActions

    def start_preparation(self, model: str | None) -> Preparation:
        self.prepared.append(model)
        self.preparations.append(Preparation())
        return self.preparations[-1]

    def end_preparation(self, preparation: Preparation) -> None:
        self.preparations.remove(preparation)

    def check_model(self, old: PreparedModel, new: PreparedModel) -> None:
        if new.name == "unfit":
            raise ModelError("the flags do not go with it")

    def is_unchanged(self, old: ServedModels, new: ServedModels) -> bool:
        return old.folders == new.folders

    def served_name(self, model: PreparedModel) -> str:
        return model.name

    def note_reloaded(self, model: str | None) -> None:
        self.reloaded.append(model)

    def two_generations_fit(self, old: PreparedModel, new: PreparedModel) -> bool:
        return self.has_room

    def start(self, boot: ProcessBoot) -> None:
        assert boot.epoch == boot.generation or boot.epoch == boot.worker_epoch
        self.boots.append(boot)
        if boot.role == "worker":
            self.weight_files.descriptor(boot.weights_generation, boot.rank, None)
        numbers = (boot.generation, boot.weights_generation)
        self.running.append(Process(boot.role, boot.index, *numbers))

    def of_generation(self, generation: int) -> list[Process]:
        return [each for each in self.running if each.generation == generation]

    def close_weight_files(self, current: int) -> None:
        ChildProcesses.close_weight_files(self, current)  # type: ignore[arg-type]

    def send_to_front_ends(self, message: Message) -> None:
        self.sent.append(message)

    # reports

    def report_begin(self) -> None:
        self.num_begun += 1

    def report_ending(self) -> None:
        """Do nothing: `test_reload_command.py` looks at the state."""

    def report_delay(self, reason: str) -> None:
        self.reasons.append(reason)

    def report_end(
        self,
        error: str,
        num_new: int,
        seconds: float,
        model: str,
        source: str,
        paths: tuple[str, ...],
        *,
        another: bool,
    ) -> None:
        self.names.append(model)
        self.ended.append((error, another))
        self.num_new.append(num_new)

    def named(self, text: str) -> str:
        """Return an error as it is reported of engine 0."""
        return text if self.num_engines == 1 else f"engine 0: {text}"

    # events

    def start_reload(
        self, outcome: PreparedModel | ModelError = NEW, model: str | None = None
    ) -> None:
        """Request a reload and finish the preparation; the new generation then starts."""
        self.reload.request(model)
        self.reload.advance()
        self.preparations[0].outcome = outcome
        self.reload.advance()

    def receive(self, *messages: Message) -> None:
        for each in messages:
            self.reload.note_message(each)
        self.reload.advance()

    def switch(self, epoch: int) -> None:
        self.receive(NextReady(0, epoch), NextReady(1, epoch))
        self.receive(Switched(0, epoch), Switched(1, epoch))

    def report_death(self, dead: Process, error: Exception | None = None) -> bool:
        """Report the death of a process; return whether the reload handles it."""
        if dead in self.running:
            self.running.remove(dead)
        dead.exit_status = -9 if error is None else 1
        dead.fatal_error = None if error is None else describe(error)
        owned = self.reload.note_death(dead)
        self.reload.advance()
        return owned

    def become_idle(self, epoch: int) -> None:
        """Report that no front end has requests at an old engine."""
        self.receive(OldEngineIdle(0, epoch), OldEngineIdle(1, epoch))

    def run_recovery(self) -> list[int]:
        """Start the processes that are due; return the epochs of engines among them."""
        found = []
        for plan in self.recovery.pop_due_restarts(self.current()):
            self.announced += plan.announcements
            for boot in plan.boots:
                self.start(boot)
                found += [boot.epoch] if boot.role == "engine_core" else []
        return found

    def current(self) -> list[Process]:
        return [each for each in self.running if self.epochs.is_current(each)]

    def report_ready(self, epoch: int) -> None:
        """Report that an engine of the recovery, and its workers, are ready."""
        for message in (lifecycle_messages.engine_ready(epoch=epoch), WorkersReady(epoch)):
            self.reload.note_message(message)
            self.recovery.note_message(message)
        self.reload.advance()

    def weights_inode(self, generation: int) -> int:
        """Return what identifies the file for weights of rank 0; a new one if it was closed."""
        return os.fstat(self.weight_files.descriptor(generation, 0, None)).st_ino

    def end_generation(self, generation: int) -> None:
        """End all processes of a generation, whose shutdown was requested."""
        for each in self.of_generation(generation):
            assert each.shutdown_requested
            assert self.report_death(each)


def roles(processes: list[Process]) -> list[str]:
    return [each.role for each in processes]
