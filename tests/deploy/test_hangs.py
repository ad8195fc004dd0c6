"""Who hangs, and who only takes his time: a clock that the test turns, and what is reported."""

import math

import pytest

from deploy.supervisor.hang_detector import (
    FIRST_STEPS,
    FIRST_STEPS_FACTOR,
    HangDetector,
    HangLimits,
)
from proto.config import ReliabilityConfig
from proto.lifecycle import EngineAlive, Role

STEP = 60.0
START = 600.0
WORKER: tuple[Role, int] = ("worker", 0)
SECOND: tuple[Role, int] = ("worker", 1)
ENGINE: tuple[Role, int] = ("engine_core", 0)
FRONT_END: tuple[Role, int] = ("api_server", 0)
WARM = FIRST_STEPS


class Watch:
    """Two workers, an engine and a front end, the latter two answering unless they are silent.

    report: what the engine answers. worker_epoch: of the workers that there are.
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
        self.asked = 0
        self.look()

    def say(self, num_steps: int, *awaits: int, **fields: bool) -> None:
        """What the engine answers from now on."""
        fields = {"ready": True, "has_work": bool(awaits), **fields}
        self.report = EngineAlive(self.worker_epoch, num_steps, awaits, **fields)

    def look(self) -> None:
        for each in self.detector.pop_due_pings():
            self.asked += 1
            if each not in self.silent:
                self.detector.note_answer(each)
                if each == ENGINE:
                    self.detector.note_engine_report(self.report, self.worker_epoch)

    def wait(self, seconds: float) -> None:
        """Look as often as one has to."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.limits.interval)
            self.look()

    def hung(self) -> list[tuple[Role, int]]:
        return [each.process for each in self.detector.find_hangs()]

    def time_to_hang(self, limit: float) -> float:
        """Seconds until there is a verdict."""
        began = self.now
        while not self.hung():
            assert self.now - began < 2 * limit, "nothing is noticed"
            self.wait(self.limits.interval / 4)
        return self.now - began


def test_who_is_idle_is_never_a_hang() -> None:
    watch = Watch()
    watch.wait(100_000)
    assert watch.hung() == []
    assert watch.detector.not_ready() == []
    assert watch.asked == pytest.approx(2 * 100_000 / watch.limits.interval, rel=0.1)


def test_a_worker_that_owes_a_step_is_blamed_and_not_the_engine_that_waits() -> None:
    watch = Watch()
    watch.say(WARM, 1)
    assert STEP <= watch.time_to_hang(STEP) <= STEP + 2 * watch.limits.interval
    (hang,) = watch.detector.find_hangs()
    assert (hang.process, hang.missing) == (SECOND, "no completed step")
    assert hang.seconds >= STEP
    assert hang.since == pytest.approx(watch.now - hang.seconds, abs=watch.limits.interval)


def test_all_who_owe_it_are_blamed() -> None:
    """Those who compute together wait for each other."""
    watch = Watch()
    watch.say(WARM, 0, 1)
    watch.time_to_hang(STEP)
    assert watch.hung() == [WORKER, SECOND]


def test_who_waits_for_others_is_not_blamed_beside_one_who_does_not() -> None:
    watch = Watch()
    watch.say(WARM, 0, 1)
    watch.wait(watch.limits.interval)
    watch.detector.note_awaits_ranks(WORKER)
    assert watch.time_to_hang(STEP) >= STEP - 2 * watch.limits.interval
    assert watch.hung() == [SECOND]
    assert [each.what for each in watch.detector.not_ready()] == ["worker 1: no completed step"]
    watch.detector.ignore(SECOND)
    watch.wait(STEP)
    assert watch.hung() == []


def test_where_all_wait_for_others_all_are_blamed_and_a_step_ends_the_waiting() -> None:
    watch = Watch()
    watch.say(WARM, 0, 1)
    watch.wait(watch.limits.interval)
    watch.detector.note_awaits_ranks(WORKER)
    watch.say(WARM + 1, 0, 1)
    watch.wait(2 * watch.limits.interval)
    watch.detector.note_awaits_ranks(SECOND)
    watch.time_to_hang(STEP)
    assert watch.hung() == [WORKER]
    watch.detector.note_awaits_ranks(WORKER)
    assert watch.hung() == [WORKER, SECOND]


def test_steps_that_are_long_but_complete_are_no_hang() -> None:
    watch = Watch()
    for step in range(WARM, WARM + 20):
        watch.say(step, 0, 1)
        watch.wait(STEP - watch.limits.interval)
        assert watch.hung() == []


def test_another_rank_that_is_late_does_not_count_for_one_that_is_later() -> None:
    watch = Watch()
    watch.say(WARM, 0, 1)
    watch.wait(STEP / 2)
    watch.say(WARM, 1)
    watch.wait(STEP / 2 + 2 * watch.limits.interval)
    assert watch.hung() == [SECOND]


def test_first_steps_may_take_longer_and_so_may_a_meeting_after_the_engine_died() -> None:
    watch = Watch()
    longer = STEP * FIRST_STEPS_FACTOR
    watch.say(FIRST_STEPS - 1, 0)
    assert longer <= watch.time_to_hang(longer) <= longer + 2 * watch.limits.interval
    watch.worker_epoch = 2
    watch.say(0, 0, ready=False)
    watch.wait(2 * watch.limits.interval)
    assert watch.hung() == []
    assert watch.time_to_hang(longer) >= longer - 2 * watch.limits.interval


def test_loading_has_its_own_limit_from_the_last_sign() -> None:
    watch = Watch()
    for each in (WORKER, SECOND):
        watch.detector.unwatch(each)
        watch.detector.watch(each)
    watch.worker_epoch = 2
    watch.say(0, 0, 1, ready=False)
    watch.wait(START - 100)
    watch.detector.note_message(WORKER)
    assert 90 <= watch.time_to_hang(START) <= 100 + 2 * watch.limits.interval
    assert watch.hung() == [SECOND]
    watch.wait(START)
    assert watch.hung() == [WORKER, SECOND]


def test_an_engine_that_is_silent_is_blamed_and_not_the_worker_of_which_it_spoke_last() -> None:
    watch = Watch()
    watch.say(WARM, 0)
    watch.wait(2 * watch.limits.interval)
    watch.silent.add(ENGINE)
    watch.time_to_hang(STEP)
    (hang,) = watch.detector.find_hangs()
    assert (hang.process, hang.missing) == (ENGINE, "no sign of life")
    watch.wait(10 * STEP)
    assert watch.hung() == [ENGINE]


def test_an_engine_with_work_that_nobody_computes_is_blamed() -> None:
    watch = Watch()
    watch.say(WARM, has_work=True)
    assert STEP <= watch.time_to_hang(STEP) <= STEP + 2 * watch.limits.interval
    (hang,) = watch.detector.find_hangs()
    assert (hang.process, hang.missing) == (ENGINE, "work but no step")


def test_silence_while_it_starts_is_measured_by_the_limit_of_a_start() -> None:
    watch = Watch()
    watch.detector.unwatch(ENGINE)
    watch.silent.add(ENGINE)
    watch.detector.watch(ENGINE)
    assert START <= watch.time_to_hang(START) <= START + 2 * watch.limits.interval


def test_a_front_end_whose_loop_is_blocked_hangs_but_keeps_nobody_else_from_serving() -> None:
    watch = Watch()
    watch.silent.add(FRONT_END)
    watch.time_to_hang(STEP)
    assert watch.hung() == [FRONT_END]
    assert watch.detector.not_ready() == []


def test_requests_should_not_come_when_half_of_the_time_is_over() -> None:
    watch = Watch()
    watch.say(WARM, 0)
    began = watch.now
    watch.wait(STEP / 2 - watch.limits.interval)
    assert watch.detector.not_ready() == []
    watch.wait(4 * watch.limits.interval)
    (reason,) = watch.detector.not_ready()
    assert reason.what == "worker 0: no completed step"
    assert began <= reason.since <= began + watch.limits.interval
    watch.wait(watch.limits.interval)
    assert watch.detector.not_ready() == [reason], "it is not told anew each time"
    watch.say(WARM + 1)
    watch.wait(2 * watch.limits.interval)
    assert watch.detector.not_ready() == []


def test_nothing_is_expected_of_one_that_is_condemned() -> None:
    watch = Watch()
    watch.say(WARM, 0)
    watch.time_to_hang(STEP)
    watch.detector.ignore(WORKER)
    assert watch.hung() == []
    assert watch.detector.not_ready() == []
    watch.detector.unwatch(WORKER)
    watch.detector.watch(WORKER)
    assert watch.hung() == []


def test_an_engine_that_has_not_heard_of_new_workers_says_nothing_of_them() -> None:
    watch = Watch()
    watch.say(WARM, 0)
    watch.worker_epoch = 2
    watch.wait(10 * STEP)
    assert watch.hung() == []


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The machine slept, or the whole daemon was stopped."""
    watch = Watch()
    watch.say(WARM, 0)
    watch.silent.add(FRONT_END)
    watch.wait(STEP / 2)
    watch.now += 10_000
    watch.look()
    assert watch.hung() == []
    watch.time_to_hang(STEP)
    assert set(watch.hung()) <= {WORKER, FRONT_END}


@pytest.mark.parametrize("step_timeout", [0.5, 3.0, 60.0])
def test_it_is_asked_often_enough_and_not_too_often(step_timeout: float) -> None:
    limits = HangLimits.of(ReliabilityConfig(step_timeout=step_timeout))
    assert limits.interval <= min(5.0, step_timeout / 8)
    assert limits.interval >= 0.05


def test_limits_that_are_off() -> None:
    watch = Watch(step_timeout=0.0, start_timeout=0.0)
    assert watch.limits == HangLimits(math.inf, math.inf, math.inf)
    watch.say(WARM, 0, 1)
    watch.silent |= {ENGINE, FRONT_END}
    watch.wait(100_000)
    assert watch.hung() == []
    assert watch.detector.not_ready() == []
