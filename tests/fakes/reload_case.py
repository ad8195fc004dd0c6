"""A reload over fake processes, on a fake clock."""

import signal
from dataclasses import dataclass, field

from deploy.supervisor.epochs import EpochCounter, ServedModels
from deploy.supervisor.recovery import Recovery
from deploy.supervisor.reload.phases import ReloadContext
from deploy.supervisor.reload.reload import Reload
from proto import PROTOCOL_VERSION
from proto.codec import Message, changed
from proto.errors import ErrorInfo, ModelError
from proto.messages.lifecycle import NextReady, ProcessBoot, Role, Switched, process_name
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
    exit_status: int | None = None
    fatal_error: ErrorInfo | None = None
    pid: int = 77
    shutdown_requested: bool = False
    signals: list[signal.Signals] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)

    @property
    def engine(self) -> int | None:
        return None if self.role == "api_server" else 0

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
    """A reload with fake processes: two front ends, two workers and one engine."""

    def __init__(self, strategy: str = "side-by-side") -> None:
        self.now = 1000.0
        config = ServeConfig(
            parallel=ParallelConfig(tensor_parallel_size=2),
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
        self.front_ends = [Process("api_server", each, 1) for each in range(2)]
        for role, index in (("worker", 0), ("worker", 1), ("engine_core", 0)):
            self.start(self.epochs.make_boot(role, index))
        for each in range(2):
            self.epochs.make_boot("api_server", each)
        self.sent: list[Message] = []
        self.ended: list[tuple[str, bool]] = []
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

    def served_name(self, model: PreparedModel) -> str:
        return model.name

    def note_reloaded(self, model: str | None) -> None:
        self.reloaded.append(model)

    def two_generations_fit(self, old: PreparedModel, new: PreparedModel) -> bool:
        return self.has_room

    def start(self, boot: ProcessBoot) -> None:
        assert boot.epoch == boot.generation or boot.epoch == boot.worker_epoch
        self.boots.append(boot)
        self.running.append(Process(boot.role, boot.index, boot.generation))

    def of_generation(self, generation: int) -> list[Process]:
        return [each for each in self.running if each.generation == generation]

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
        seconds: float,
        model: str,
        source: str,
        paths: tuple[str, ...],
        *,
        another: bool,
    ) -> None:
        self.names.append(model)
        self.ended.append((error, another))

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

    def end_generation(self, generation: int) -> None:
        """End all processes of a generation, whose shutdown was requested."""
        for each in self.of_generation(generation):
            assert each.shutdown_requested
            assert self.report_death(each)


def roles(processes: list[Process]) -> list[str]:
    return [each.role for each in processes]
