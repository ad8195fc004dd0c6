"""Restarts: which processes, when and how often, without real processes."""

import signal
from dataclasses import dataclass

import pytest

from deploy.supervisor.epochs import Announcement, EpochCounter
from deploy.supervisor.processes import StartError
from deploy.supervisor.recovery import Recovery
from proto.errors import ErrorInfo, ModelError
from proto.messages.lifecycle import (
    FrontEndReady,
    Heartbeat,
    NewEngine,
    NewFrontEnd,
    NewWorkers,
    NotReady,
    Paused,
    ProtocolViolation,
    Restarted,
    Role,
    WorkersReady,
    process_name,
)
from proto.runtime.process import describe
from proto.settings.config import FrontEndConfig, ParallelConfig, ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.notices import Notices


@dataclass
class Process:
    role: Role
    index: int = 0
    exit_status: int | None = -signal.SIGKILL
    fatal_error: ErrorInfo | None = None
    pid: int = 77

    @property
    def engine(self) -> int | None:
        if self.role == "api_server":
            return None
        return self.index // 2 if self.role == "worker" else self.index

    @property
    def name(self) -> str:
        return process_name(self.role, self.index)


class Case:
    """A recovery after the first start of two workers, an engine and two front ends.

    num_engines: each has two workers; those of further engines come last in `processes`.
    """

    def __init__(self, max_restarts: int = 8, num_engines: int = 1) -> None:
        self.now = 1000.0
        config = ServeConfig(
            parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=num_engines),
            frontend=FrontEndConfig(api_server_count=2),
        )
        template = lifecycle_messages.boot("worker", epoch=0, worker_epoch=0, config=config)
        self.epochs = EpochCounter(template, (9,))
        self.notices = Notices()
        self.recovery = Recovery(self.epochs, max_restarts, self.notices, lambda: self.now)
        self.processes = [Process("worker", 0), Process("worker", 1), Process("engine_core")]
        self.processes += [Process("api_server", 0), Process("api_server", 1)]
        for engine in range(1, num_engines):
            workers = [Process("worker", index) for index in self.epochs.workers_of(engine)]
            self.processes += [*workers, Process("engine_core", engine)]
        self.first = [self.epochs.make_boot(each.role, each.index) for each in self.processes]

    def die(self, number: int, **how: object) -> bool:
        """Report the death of a process; return whether it will be restarted."""
        dead = Process(self.processes[number].role, self.processes[number].index, **how)
        if not self.recovery.can_restart(dead):
            return False
        self.recovery.note_death(dead)
        return True

    def must_kill(self, number: int) -> bool:
        return self.recovery.must_kill(self.processes[number])

    def due(self, *running: int):
        return self.recovery.pop_due_restarts([self.processes[number] for number in running])


def test_first_processes_boot_with_epoch_one() -> None:
    boots = Case().first
    assert {(each.epoch, each.worker_epoch, each.incarnation) for each in boots} == {(1, 1, 0)}
    assert [each.listen_fds for each in boots] == [(), (), (), (9,), (9,)]
    assert boots[2].front_ends == (0, 0)


def test_the_death_of_a_worker_restarts_all_ranks() -> None:
    case = Case()
    assert not case.must_kill(0)
    assert case.die(1)
    assert case.must_kill(0)
    assert case.due(0, 2, 3, 4) == [], "the other worker still runs"
    assert case.die(0), "the supervisor killed it, so it does not count as another death"
    (succession,) = case.due(2, 3, 4)
    assert succession.announcements == [
        Announcement("engine_core", NewWorkers(2), 0),
        Announcement("api_server", Restarted("worker", False, 0)),
    ]
    assert [(each.role, each.index, each.incarnation) for each in succession.boots] == [
        ("worker", 0, 1),
        ("worker", 1, 1),
    ]
    assert {(each.epoch, each.worker_epoch) for each in succession.boots} == {(1, 2)}
    assert not case.must_kill(0)
    case.now += 3
    case.recovery.note_message(WorkersReady(1))
    assert len(case.notices.lines) == 1
    case.recovery.note_message(WorkersReady(2))
    assert case.notices.lines == [
        "WARNING worker 1 (pid 77) was killed by SIGKILL; it is restarted",
        "worker 0 is back after 3.0 s",
    ]


def test_an_invalid_message_of_a_worker_restarts_all_ranks() -> None:
    case = Case()
    case.recovery.note_message(ProtocolViolation("worker", 1, 1, "it sends garbage"))
    assert case.must_kill(0)
    assert not case.must_kill(2)
    assert case.due(0, 1, 2, 3, 4) == []
    assert case.die(1)
    assert case.die(0)
    (succession,) = case.due(2, 3, 4)
    assert [each.index for each in succession.boots] == [0, 1]
    assert not case.must_kill(0), "the report does not apply to new workers"
    case.recovery.note_message(ProtocolViolation("worker", 1, 1, "it is late"))
    assert not case.must_kill(0)
    assert case.notices.lines == [
        "WARNING worker 1 sent an invalid message and is killed: it sends garbage",
        "WARNING worker 1 (pid 77) was killed by SIGKILL; it is restarted",
    ]


def test_an_invalid_message_of_the_engine_restarts_only_the_engine() -> None:
    case = Case()
    case.recovery.note_message(ProtocolViolation("engine_core", 0, 1, "it sends garbage"))
    case.recovery.note_message(ProtocolViolation("engine_core", 0, 1, "another front end says so"))
    assert case.must_kill(2)
    assert not case.must_kill(0)
    assert case.die(2)
    (succession,) = case.due(0, 1, 3, 4)
    assert succession.boots[0].role == "engine_core"
    assert not case.must_kill(2)


def test_repeated_invalid_messages_end_the_daemon() -> None:
    case = Case(max_restarts=1)
    case.recovery.note_message(ProtocolViolation("engine_core", 0, 1, "it sends garbage"))
    assert case.die(2)
    case.due(0, 1, 3, 4)
    case.recovery.note_message(ProtocolViolation("engine_core", 0, 2, "it sends garbage"))
    assert not case.die(2)


def test_a_new_engine_boots_with_the_current_front_ends_and_pause() -> None:
    case = Case()
    case.die(4)
    (succession,) = case.due(0, 1, 2, 3)
    assert succession.announcements[0] == Announcement("engine_core", NewFrontEnd(1, 1))
    case.recovery.note_message(FrontEndReady(1))
    case.recovery.note_message(Paused("freeze"))
    case.die(2)
    (succession,) = case.due(0, 1, 3, 4)
    assert succession.announcements == [
        Announcement("worker", NewEngine(2, 2), 0),
        Announcement("api_server", NewEngine(2, 2)),
        Announcement("api_server", Restarted("engine_core", False, 0)),
    ]
    (boot,) = succession.boots
    assert (boot.epoch, boot.worker_epoch, boot.incarnation) == (2, 2, 1)
    assert (boot.front_ends, boot.pause_mode) == ((0, 1), "freeze")
    case.now += 1.5
    case.recovery.note_message(lifecycle_messages.engine_ready(epoch=2))
    assert case.notices.lines[-1] == "engine 0 is back after 1.5 s"


def test_the_engine_restarts_first_and_workers_get_the_later_epoch() -> None:
    case = Case()
    case.die(0)
    case.die(1)
    case.die(2)
    engine, workers = case.due(3, 4)
    assert engine.boots[0].worker_epoch == 2
    assert workers.announcements[0] == Announcement("engine_core", NewWorkers(3), 0)
    assert {(each.epoch, each.worker_epoch) for each in workers.boots} == {(2, 3)}


def test_a_hang_is_announced_once_before_the_process_is_dead() -> None:
    case = Case()
    worker = case.processes[1]
    assert case.recovery.disconnect(worker) == [Announcement("engine_core", NewWorkers(2), 0)]
    assert case.recovery.disconnect(case.processes[0]) == [], "the workers share one model"
    assert not case.must_kill(0)
    assert case.due(0, 2, 3, 4) == []
    assert case.die(1)
    assert case.must_kill(0)
    assert case.die(0)
    (succession,) = case.due(2, 3, 4)
    assert succession.announcements == [Announcement("api_server", Restarted("worker", True, 0))]
    assert {each.worker_epoch for each in succession.boots} == {2}
    assert case.die(2)
    (succession,) = case.due(0, 1, 3, 4)
    assert (
        Announcement("api_server", Restarted("engine_core", False, 0)) in succession.announcements
    )


def test_a_front_end_boots_with_the_number_of_its_hangs() -> None:
    """With a single front end no other one could count them."""
    case = Case()
    for hangs, num_hung in ((True, 1), (False, 1), (True, 2)):
        if hangs:
            case.recovery.disconnect(case.processes[3])
        assert case.die(3)
        case.now += 60
        (succession,) = case.due(0, 1, 2, 4)
        (boot,) = succession.boots
        assert boot.num_hung == num_hung
        case.recovery.note_message(FrontEndReady(boot.index))


def test_a_death_between_a_hang_and_its_kill_updates_both_epochs() -> None:
    """The engine hangs, a worker crashes, then the engine is killed."""
    case = Case()
    message = NewEngine(2, 2)
    announcements = case.recovery.disconnect(case.processes[2])
    assert announcements == [
        Announcement("worker", message, 0),
        Announcement("api_server", message),
    ]
    case.die(0)
    case.die(1)
    (workers,) = case.due(2, 3, 4)
    assert workers.announcements[0] == Announcement("engine_core", NewWorkers(3), 0)
    case.die(2)
    (engine,) = case.due(0, 1, 3, 4)
    assert engine.announcements == [Announcement("api_server", Restarted("engine_core", True, 0))]
    for boot in (*workers.boots, *engine.boots):
        assert (boot.epoch, boot.worker_epoch) == (2, 3)


def test_a_restart_of_the_engine_makes_the_daemon_not_ready() -> None:
    case = Case()
    assert case.recovery.not_ready() == []
    case.die(2)
    case.now += 2
    assert case.recovery.not_ready() == [
        NotReady("engine 0 is being restarted", 1000.0, 0, is_restarted=True)
    ]
    case.due(0, 1, 3, 4)
    assert len(case.recovery.not_ready()) == 1
    case.recovery.note_message(lifecycle_messages.engine_ready(epoch=2))
    assert case.recovery.not_ready() == []
    case.die(3)
    assert case.recovery.not_ready() == [], "clients connect to another front end"


def test_restarts_in_a_row_back_off_and_then_stop() -> None:
    case = Case(max_restarts=7)
    waits = []
    for _ in range(7):
        assert case.die(2)
        waits.append(case.recovery.seconds_to_next_restart())
        case.now += waits[-1]
        assert len(case.due(0, 1, 3, 4)) == 1
        assert case.recovery.seconds_to_next_restart() is None
    assert waits == [0, 0, 0.25, 0.5, 1, 2, 4]
    assert not case.die(2)
    assert case.notices.lines[-1] == (
        "WARNING tokend: 7 restarts have not led to one completed step (--max-restarts)"
    )


def test_processes_that_cannot_be_started_are_tried_again() -> None:
    """All workers of a model, of which some may have been started already."""
    case = Case(max_restarts=3)
    case.die(0)
    ((_, boots),) = case.due(2, 3, 4)
    error = StartError(boots[1], "Resource temporarily unavailable")
    case.recovery.note_failed_start(boots[1], error)
    assert case.notices.lines[-1] == (
        "WARNING worker 1 cannot be started: Resource temporarily unavailable; it is tried again "
        "in 0.25 s"
    )
    assert case.must_kill(0)
    assert case.recovery.seconds_to_next_restart() == 0.25
    case.now += 0.25
    assert not case.due(0, 2, 3, 4), "the first worker still runs"
    ((_, boots),) = case.due(2, 3, 4)
    assert [boot.index for boot in boots] == [0, 1]
    case.recovery.note_failed_start(boots[0], error)
    with pytest.raises(StartError, match="worker 1 cannot be started: Resource"):
        case.recovery.note_failed_start(boots[0], error)


def test_without_restarts_the_message_names_the_flag() -> None:
    case = Case(max_restarts=0)
    assert not case.die(2)
    assert (
        case.notices.lines[-1]
        == "WARNING tokend: a process is not started again: --max-restarts is 0"
    )


@pytest.mark.parametrize("worker_epoch", [1, 4])
def test_a_completed_step_of_current_workers_renews_the_budget(worker_epoch: int) -> None:
    """Steps of dead workers do not."""
    case = Case(max_restarts=3)
    for _ in range(3):
        assert case.die(2)
        case.now += case.recovery.seconds_to_next_restart()
        case.due(0, 1, 3, 4)
    case.recovery.note_message(Heartbeat(worker_epoch, 100))
    assert case.die(2) is (worker_epoch == 4)


def test_old_restarts_do_not_count_against_the_budget() -> None:
    case = Case(max_restarts=1)
    assert case.die(2)
    case.due(0, 1, 3, 4)
    case.now += 599
    assert not case.die(2)
    case.now += 2
    assert case.die(2)


def test_an_error_for_the_user_to_fix_is_not_retried() -> None:
    error = describe(ModelError("config.json: no"))
    assert not Case().die(0, exit_status=1, fatal_error=error)


def test_the_traceback_is_shown() -> None:
    case = Case()
    case.die(0, exit_status=1, fatal_error=ErrorInfo("internal", "ValueError: x", traceback="T\n"))
    assert case.notices.lines == [
        "WARNING worker 0 (pid 77) failed with ValueError: x; it is restarted\n  T"
    ]


# ---- Several engines ----


def test_each_engine_has_epochs_of_its_own() -> None:
    case = Case(num_engines=3)
    assert [each.epoch for each in case.first] == [1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {each.engine_epochs for each in case.first} == {(1, 2, 3)}
    assert not any(each.replaces_dead for each in case.first if each.role == "worker")
    case.die(7)
    (succession,) = case.due(0, 1, 2, 3, 4, 5, 6, 8, 9, 10)
    message = NewEngine(4, 4, engine=1)
    assert succession.announcements == [
        Announcement("worker", message, 1),
        Announcement("api_server", message),
        Announcement("api_server", Restarted("engine_core", False, 1)),
    ]
    assert [(each.index, each.epoch) for each in succession.boots] == [(1, 4)]
    case.die(8)
    case.die(9)
    (succession,) = case.due(0, 1, 2, 3, 4, 5, 6, 7, 10)
    assert succession.announcements[0] == Announcement("engine_core", NewWorkers(5), 2)
    boots = succession.boots
    assert [(each.index, each.rank, each.epoch, each.worker_epoch) for each in boots] == [
        (4, 0, 3, 5),
        (5, 1, 3, 5),
    ]
    assert all(each.replaces_dead for each in boots)


def test_a_dead_worker_ends_the_other_ranks_of_its_engine_alone() -> None:
    case = Case(num_engines=2)
    case.die(5)
    assert [case.must_kill(number) for number in range(8)] == [False] * 5 + [True, True, False]
    case.recovery.note_message(ProtocolViolation("worker", 0, 1, "it sends garbage"))
    assert [case.must_kill(number) for number in range(8)] == [
        *[True, True, False, False, False],
        *[True, True, False],
    ]


def test_what_an_engine_reports_is_noted_for_it_alone() -> None:
    case = Case(num_engines=2)
    for number in (2, 5, 6, 7):
        case.die(number)
    assert len(case.due(0, 1, 3, 4)) == 3
    epochs, worker_epochs = case.epochs.epochs, case.epochs.worker_epochs
    case.recovery.note_message(lifecycle_messages.engine_ready(epoch=epochs[1], engine=1))
    assert [each.engine for each in case.recovery.not_ready()] == [0, 1]
    case.recovery.note_message(WorkersReady(worker_epochs[1]))
    assert [each.what for each in case.recovery.not_ready()] == ["engine 0 is being restarted"]


def test_an_engine_that_keeps_dying_rests_while_another_one_is_left() -> None:
    case = Case(max_restarts=2, num_engines=2)
    others = (0, 1, 2, 3, 4, 5, 6)
    for _ in range(2):
        assert case.die(7)
        assert len(case.due(*others)) == 1
        case.recovery.note_message(Heartbeat(1, 100))  # a step of engine 0
    assert case.die(7)
    assert case.recovery.seconds_to_next_restart() == 600
    assert case.recovery.not_ready() == [
        NotReady("engine 1 rests before its next restart", 1000.0, 1, is_restarted=True, rests=True)
    ]
    case.now += 30
    assert case.die(5), "without an engine its workers end"
    assert case.recovery.seconds_to_next_restart() == 570
    assert case.die(2), "engine 0 has its own budget"
    assert len(case.due(0, 1, 3, 4, 5, 6)) == 1
    case.recovery.note_message(lifecycle_messages.engine_ready(epoch=case.epochs.epochs[0]))
    case.now += 570
    engine, workers = case.due(0, 1, 2, 3, 4)
    assert [(each.role, each.index) for each in engine.boots] == [("engine_core", 1)]
    assert [each.index for each in workers.boots] == [2, 3]
    assert case.die(7)
    assert case.recovery.seconds_to_next_restart() == 0, "its budget is whole after the rest"


def test_the_daemon_ends_when_no_engine_is_left_that_does_not_rest() -> None:
    case = Case(max_restarts=1, num_engines=2)
    error = describe(ModelError("config.json: no"))
    assert case.die(7, exit_status=1, fatal_error=error)
    assert case.recovery.seconds_to_next_restart() == 600
    assert not case.die(2, exit_status=1, fatal_error=error)
    assert case.die(2)
    assert not case.die(2)


def test_without_restarts_the_first_death_of_an_engine_ends_the_daemon() -> None:
    assert not Case(max_restarts=0, num_engines=2).die(7)
