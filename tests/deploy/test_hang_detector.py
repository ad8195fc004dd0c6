"""Hang detection, on a fake clock: hung processes, slow ones, and the reported reasons."""

import math

import pytest

from deploy.supervisor.hang_detector import (
    FIRST_STEPS,
    FIRST_STEPS_FACTOR,
    HangDetector,
    HangLimits,
)
from proto.messages.lifecycle import EngineAlive, Role
from proto.settings.config import ReliabilityConfig

STEP = 60.0
START = 600.0
WORKER: tuple[Role, int] = ("worker", 0)
SECOND: tuple[Role, int] = ("worker", 1)
ENGINE: tuple[Role, int] = ("engine_core", 0)
FRONT_END: tuple[Role, int] = ("api_server", 0)
WARM = FIRST_STEPS


class Watch:
    """A detector over two workers, an engine and a front end.

    The engine and the front end answer pings unless they are in `silent`. report: the engine's
    answer. worker_epoch: of the current workers.
    """

    def __init__(self, **reliability: float) -> None:
        self.now = 1000.0
        self.limits = HangLimits.of(ReliabilityConfig(**reliability))
        self.detector = HangDetector(self.limits, lambda: self.now)
        for each in (WORKER, SECOND, ENGINE, FRONT_END):
            self.detector.watch(each)
        self.silent: set[tuple[Role, int]] = set()
        self.worker_epoch = 1
        self.report = EngineAlive(1, WARM, ready=True)
        self.num_pings = 0
        self.check()

    def set_report(self, num_steps: int, *awaits: int, **fields: bool) -> None:
        """Set the engine's answer to pings."""
        fields = {"ready": True, "has_work": bool(awaits), **fields}
        self.report = EngineAlive(self.worker_epoch, num_steps, awaits, **fields)

    def check(self) -> None:
        for each in self.detector.pop_due_pings():
            self.num_pings += 1
            if each not in self.silent:
                self.detector.note_answer(each)
                if each == ENGINE:
                    self.detector.note_engine_report(self.report, self.worker_epoch)

    def wait(self, seconds: float) -> None:
        """Advance the clock and check at every interval."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.limits.interval)
            self.check()

    def hung(self) -> list[tuple[Role, int]]:
        return [each.process for each in self.detector.find_hangs()]

    def time_to_hang(self, limit: float) -> float:
        """Wait until a hang is found; return the seconds."""
        began = self.now
        while not self.hung():
            assert self.now - began < 2 * limit, "no hang was found"
            self.wait(self.limits.interval / 4)
        return self.now - began


def test_idle_processes_do_not_hang() -> None:
    watch = Watch()
    watch.wait(100_000)
    assert watch.hung() == []
    assert watch.detector.not_ready() == []
    assert watch.num_pings == pytest.approx(2 * 100_000 / watch.limits.interval, rel=0.1)


def test_a_worker_that_owes_a_step_hangs_and_not_the_engine() -> None:
    watch = Watch()
    watch.set_report(WARM, 1)
    assert STEP <= watch.time_to_hang(STEP) <= STEP + 2 * watch.limits.interval
    (hang,) = watch.detector.find_hangs()
    assert (hang.process, hang.missing) == (SECOND, "no completed step")
    assert hang.seconds >= STEP
    assert hang.since == pytest.approx(watch.now - hang.seconds, abs=watch.limits.interval)


def test_all_workers_that_owe_a_step_hang() -> None:
    """Ranks of one model wait for each other."""
    watch = Watch()
    watch.set_report(WARM, 0, 1)
    watch.time_to_hang(STEP)
    assert watch.hung() == [WORKER, SECOND]


def test_a_worker_that_waits_for_other_ranks_does_not_hang() -> None:
    watch = Watch()
    watch.set_report(WARM, 0, 1)
    watch.wait(watch.limits.interval)
    watch.detector.note_awaits_ranks(WORKER)
    assert watch.time_to_hang(STEP) >= STEP - 2 * watch.limits.interval
    assert watch.hung() == [SECOND]
    assert [each.what for each in watch.detector.not_ready()] == ["worker 1: no completed step"]
    watch.detector.ignore(SECOND)
    watch.wait(STEP)
    assert watch.hung() == []


def test_workers_that_all_wait_for_ranks_hang_unless_a_step_completes() -> None:
    watch = Watch()
    watch.set_report(WARM, 0, 1)
    watch.wait(watch.limits.interval)
    watch.detector.note_awaits_ranks(WORKER)
    watch.set_report(WARM + 1, 0, 1)
    watch.wait(2 * watch.limits.interval)
    watch.detector.note_awaits_ranks(SECOND)
    watch.time_to_hang(STEP)
    assert watch.hung() == [WORKER]
    watch.detector.note_awaits_ranks(WORKER)
    assert watch.hung() == [WORKER, SECOND]


def test_long_steps_that_complete_are_not_a_hang() -> None:
    watch = Watch()
    for step in range(WARM, WARM + 20):
        watch.set_report(step, 0, 1)
        watch.wait(STEP - watch.limits.interval)
        assert watch.hung() == []


def test_the_worker_that_still_owes_the_step_hangs() -> None:
    watch = Watch()
    watch.set_report(WARM, 0, 1)
    watch.wait(STEP / 2)
    watch.set_report(WARM, 1)
    watch.wait(STEP / 2 + 2 * watch.limits.interval)
    assert watch.hung() == [SECOND]


def test_first_steps_and_a_reconnect_after_an_engine_death_have_longer_limits() -> None:
    watch = Watch()
    longer = STEP * FIRST_STEPS_FACTOR
    watch.set_report(FIRST_STEPS - 1, 0)
    assert longer <= watch.time_to_hang(longer) <= longer + 2 * watch.limits.interval
    watch.worker_epoch = 2
    watch.set_report(0, 0, ready=False)
    watch.wait(2 * watch.limits.interval)
    assert watch.hung() == []
    assert watch.time_to_hang(longer) >= longer - 2 * watch.limits.interval


def test_the_start_limit_counts_from_the_last_progress_message() -> None:
    watch = Watch()
    for each in (WORKER, SECOND):
        watch.detector.unwatch(each)
        watch.detector.watch(each)
    watch.worker_epoch = 2
    watch.set_report(0, 0, 1, ready=False)
    watch.wait(START - 100)
    watch.detector.note_message(WORKER)
    assert 90 <= watch.time_to_hang(START) <= 100 + 2 * watch.limits.interval
    assert watch.hung() == [SECOND]
    watch.wait(START)
    assert watch.hung() == [WORKER, SECOND]


def test_a_silent_engine_hangs_and_not_the_worker_it_last_reported() -> None:
    watch = Watch()
    watch.set_report(WARM, 0)
    watch.wait(2 * watch.limits.interval)
    watch.silent.add(ENGINE)
    watch.time_to_hang(STEP)
    (hang,) = watch.detector.find_hangs()
    assert (hang.process, hang.missing) == (ENGINE, "no sign of life")
    watch.wait(10 * STEP)
    assert watch.hung() == [ENGINE]


def test_an_engine_with_work_but_no_step_hangs() -> None:
    watch = Watch()
    watch.set_report(WARM, has_work=True)
    assert STEP <= watch.time_to_hang(STEP) <= STEP + 2 * watch.limits.interval
    (hang,) = watch.detector.find_hangs()
    assert (hang.process, hang.missing) == (ENGINE, "work but no step")


def test_a_silent_starting_engine_has_the_start_limit() -> None:
    watch = Watch()
    watch.detector.unwatch(ENGINE)
    watch.silent.add(ENGINE)
    watch.detector.watch(ENGINE)
    assert START <= watch.time_to_hang(START) <= START + 2 * watch.limits.interval


def test_a_hung_front_end_does_not_make_the_daemon_not_ready() -> None:
    watch = Watch()
    watch.silent.add(FRONT_END)
    watch.time_to_hang(STEP)
    assert watch.hung() == [FRONT_END]
    assert watch.detector.not_ready() == []


def test_the_daemon_is_not_ready_after_half_of_the_limit() -> None:
    watch = Watch()
    watch.set_report(WARM, 0)
    began = watch.now
    watch.wait(STEP / 2 - watch.limits.interval)
    assert watch.detector.not_ready() == []
    watch.wait(4 * watch.limits.interval)
    (reason,) = watch.detector.not_ready()
    assert reason.what == "worker 0: no completed step"
    assert began <= reason.since <= began + watch.limits.interval
    watch.wait(watch.limits.interval)
    assert watch.detector.not_ready() == [reason], "the reason stays the same"
    watch.set_report(WARM + 1)
    watch.wait(2 * watch.limits.interval)
    assert watch.detector.not_ready() == []


def test_an_ignored_process_does_not_hang() -> None:
    watch = Watch()
    watch.set_report(WARM, 0)
    watch.time_to_hang(STEP)
    watch.detector.ignore(WORKER)
    assert watch.hung() == []
    assert watch.detector.not_ready() == []
    watch.detector.unwatch(WORKER)
    watch.detector.watch(WORKER)
    assert watch.hung() == []


def test_reports_about_previous_workers_are_ignored() -> None:
    watch = Watch()
    watch.set_report(WARM, 0)
    watch.worker_epoch = 2
    watch.wait(10 * STEP)
    assert watch.hung() == []


def test_time_without_checks_does_not_count() -> None:
    """For example the machine slept, or the whole daemon was stopped."""
    watch = Watch()
    watch.set_report(WARM, 0)
    watch.silent.add(FRONT_END)
    watch.wait(STEP / 2)
    watch.now += 10_000
    watch.check()
    assert watch.hung() == []
    watch.time_to_hang(STEP)
    assert set(watch.hung()) <= {WORKER, FRONT_END}


@pytest.mark.parametrize("step_timeout", [0.5, 3.0, 60.0])
def test_the_ping_interval_follows_step_timeout(step_timeout: float) -> None:
    limits = HangLimits.of(ReliabilityConfig(step_timeout=step_timeout))
    assert limits.interval <= min(5.0, step_timeout / 8)
    assert limits.interval >= 0.05


def test_zero_limits_disable_hang_detection() -> None:
    watch = Watch(step_timeout=0.0, start_timeout=0.0)
    assert watch.limits == HangLimits(math.inf, math.inf, math.inf)
    watch.set_report(WARM, 0, 1)
    watch.silent |= {ENGINE, FRONT_END}
    watch.wait(100_000)
    assert watch.hung() == []
    assert watch.detector.not_ready() == []


def test_standby_processes_are_pinged_workers_too() -> None:
    """No engine judges them. While they start, the longer limit holds."""
    now = 1000.0
    limits = HangLimits.of(ReliabilityConfig(step_timeout=STEP, start_timeout=START))
    detector = HangDetector(limits, lambda: now, engine=None)
    detector.watch(WORKER)
    detector.watch(SECOND)
    assert detector.pop_due_pings() == [WORKER, SECOND]
    detector.note_ready(WORKER)
    for _ in range(13):
        now += limits.interval
        detector.find_hangs()
    assert [each.process for each in detector.find_hangs()] == [WORKER]
    assert detector.pop_due_pings() == [], "one ping at a time"


def test_what_was_a_standby_process_starts_within_the_limit_of_a_step() -> None:
    now = 1000.0
    limits = HangLimits.of(ReliabilityConfig(step_timeout=STEP, start_timeout=START))
    detector = HangDetector(limits, lambda: now)
    detector.watch(ENGINE, is_prepared=True)
    assert detector.pop_due_pings() == [ENGINE]
    for _ in range(13):
        now += limits.interval
        found = detector.find_hangs()
    assert [each.flag for each in found] == ["--step-timeout"]
