"""Queue timeouts and deadlines of requests, and the state after they expire."""

from math import inf

import pytest

from engine_core.request import RequestStatus
from engine_core.scheduler.limits import Deadlines
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.messages import make_request, request


class Watch:
    """Deadlines without a scheduler."""

    def __init__(self):
        self.clock = FakeClock()
        self.deadlines = Deadlines(self.clock)

    def enter(self, request_id, choice=0, **fields):
        each = make_request(10 * request_id + choice, [1, 2], request_id=request_id, choice=choice)
        self.deadlines.track_request(each, request(request_id, arrival_time=100.0, **fields))
        return each

    def overdue(self, now):
        """Return the expired requests and their limits."""
        self.clock.now = now
        return [(each.request_id, each.error.kind) for each in self.deadlines.pop_overdue()]


def test_every_request_expires_at_its_own_deadline():
    watch = Watch()
    watch.enter(1, deadline=130.0)
    watch.enter(2, deadline=110.0)
    watch.enter(3, deadline=120.0, queue_deadline=115.0)
    watch.enter(4)
    assert watch.deadlines.seconds_to_next_end == 10.0
    assert watch.overdue(109.9) == []
    assert watch.overdue(110.0) == [(2, "time_limit")]
    assert watch.overdue(117.0) == [(3, "queue_timeout")]
    assert watch.overdue(129.0) == []
    assert watch.overdue(1000.0) == [(1, "time_limit")]
    assert watch.deadlines.seconds_to_next_end is None


def test_a_deadline_in_the_past_expires_at_once():
    watch = Watch()
    watch.enter(1, deadline=99.0)
    assert watch.deadlines.seconds_to_next_end == 0.0
    assert watch.overdue(100.0) == [(1, "time_limit")]


def test_an_admitted_request_has_no_queue_deadline():
    watch = Watch()
    begun = watch.enter(1, queue_deadline=110.0)
    both = watch.enter(2, queue_deadline=110.0, deadline=120.0)
    for each in (begun, both):
        watch.deadlines.on_admitted(each, 1)
    assert watch.overdue(119.0) == []
    assert watch.overdue(120.0) == [(2, "time_limit")]


def test_one_choice_that_begins_is_enough():
    watch = Watch()
    first, _ = [watch.enter(1, choice, queue_deadline=110.0) for choice in range(2)]
    watch.deadlines.on_admitted(first, 1)
    assert watch.overdue(110.0) == []


def test_tokens_from_before_a_crash_say_that_it_has_begun():
    watch = Watch()
    watch.enter(1, queue_deadline=110.0, output_token_ids=((7,),))
    watch.enter(2, queue_deadline=110.0, output_token_ids=((),))
    assert watch.overdue(110.0) == [(2, "queue_timeout")]


def test_a_deadline_ends_with_the_last_choice():
    watch = Watch()
    choices = [watch.enter(1, choice, deadline=110.0) for choice in range(2)]
    watch.deadlines.on_released(choices[0])
    assert watch.overdue(110.0) == [(1, "time_limit")]
    choices = [watch.enter(2, choice, deadline=120.0) for choice in range(2)]
    for each in choices:
        watch.deadlines.on_released(each)
    assert watch.overdue(120.0) == []


def test_deadlines_of_finished_requests_are_released():
    watch = Watch()
    watch.enter(0, deadline=50_000.0)
    for request_id in range(1, 2_000):
        watch.deadlines.on_released(watch.enter(request_id, deadline=1e6, queue_deadline=1e5))
    assert len(watch.deadlines._next._heap) < 100
    assert watch.overdue(inf) == [(0, "time_limit")]


def test_the_error_message_names_the_time_limit():
    watch = Watch()
    watch.enter(1, deadline=102.5)
    watch.enter(2, queue_deadline=100.25)
    watch.clock.now = 103.0
    texts = [each.error.message for each in watch.deadlines.pop_overdue()]
    assert "0.25 s" in texts[0]
    assert "2.5 s" in texts[1]


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "in flight", "frozen"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_an_expired_request_leaves_no_state(state, overlapped):
    clock = FakeClock()
    engine = EngineHarness(clock=clock, max_num_seqs=4, async_scheduling=overlapped)
    message = request(deadline=110.0)
    if state == "waiting":
        engine.add([9], n=4, max_tokens=50)
        engine.step()
    choices = engine.add([1, 2, 3], n=2, max_tokens=50)
    for each in choices:
        engine.scheduler.deadlines.track_request(each, message)
    if state in ("running", "preempted", "frozen"):
        engine.step()
        engine.step()
    if state == "preempted":
        engine.scheduler.reset_prefix_cache(preempting=True)
        assert choices[0].status is RequestStatus.PREEMPTED
    if state == "frozen":
        engine.scheduler.pause("freeze")
    if state == "in flight":
        engine.send()
    clock.now = 111.0
    (overdue,) = engine.scheduler.deadlines.pop_overdue()
    assert engine.scheduler.abort_request(choices[0].request_id) == 2
    assert overdue.error.kind == "time_limit"
    engine.scheduler.resume()
    if engine.in_flight:
        engine.receive()
    engine.run()
    if engine.scheduler.has_work or engine.in_flight:
        engine.step()
    engine.assert_idle()
