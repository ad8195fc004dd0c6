"""Queue limits: counted requests, refusals, and the retry estimate."""

import pytest

from engine_core.scheduler.limits import QueueCapacity, QueueDrainRate, QueueLimits, queue_capacity
from proto.errors import QueueFullError
from proto.settings.config import SchedulerConfig
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.messages import make_request, request


def queue(engine: EngineHarness, *prompts: list[int], **fields: object) -> list:
    """Add requests like the input processor does with valid messages."""
    added = []
    for prompt in prompts:
        for each in engine.add(prompt, **fields):
            engine.scheduler.queue_limits.count_request(each)
            added.append(each)
    return added


def counts(engine: EngineHarness) -> tuple[int, int]:
    stats = engine.scheduler.pop_stats()
    return stats.num_queued_reqs, stats.num_queued_tokens


def test_queue_limits_follow_from_the_pool_and_max_num_seqs():
    config = SchedulerConfig(max_num_seqs=100)
    assert queue_capacity(config, 10_000, 16) == QueueCapacity(400, 640_000)
    assert queue_capacity(config, 50, 1024) == QueueCapacity(200, 204_800), "a seat needs a block"
    assert queue_capacity(config, 10, 16) == QueueCapacity(64, 65_536), "the least"
    given = SchedulerConfig(max_num_queued_reqs=3, max_num_queued_tokens=0)
    assert queue_capacity(given, 10_000, 16) == QueueCapacity(3, 0)


def test_admitted_and_finished_requests_are_not_counted():
    engine = EngineHarness(max_num_seqs=1)
    first, second, third = queue(engine, [1] * 10, [2] * 20, [3] * 30, max_tokens=2)
    assert counts(engine) == (3, 60)
    engine.step()
    assert counts(engine) == (2, 50)
    engine.scheduler.abort_request(third.request_id)
    assert counts(engine) == (1, 20)
    engine.run_until_finished(first)
    engine.step()
    assert second.scheduled_at is not None
    assert counts(engine) == (0, 0)
    engine.run()
    engine.assert_idle()


def test_preempted_requests_are_not_counted_again():
    engine = EngineHarness(max_num_seqs=2)
    queue(engine, [1] * 10, [2] * 10, [3] * 10)
    engine.step()
    engine.scheduler.reset_prefix_cache(preempting=True)
    assert len(engine.scheduler.waiting) == 3
    assert counts(engine) == (1, 10)
    engine.step()
    engine.lose_workers()
    assert counts(engine) == (1, 10)


def test_choices_count_one_by_one_and_their_prompt_once():
    engine = EngineHarness()
    queue(engine, [1] * 20, n=3)
    assert counts(engine) == (3, 20)
    engine.step()
    assert counts(engine) == (2, 0), "two wait for the prompt that the first computes"
    engine.run()
    assert counts(engine) == (0, 0)


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        (
            request(n=4),
            "max_num_queued_reqs",
            ["6 requests", "add 4", "--max-num-queued-reqs is 9"],
        ),
        (
            request(prompt=[1] * 41),
            "max_num_queued_tokens",
            ["60 prompt tokens", "add 41", "--max-num-queued-tokens is 100"],
        ),
    ],
)
def test_more_than_may_wait_is_refused_with_the_limit(message, param, words):
    backlog = QueueLimits(QueueCapacity(9, 100), FakeClock())
    for seq_id in range(6):
        backlog.count_request(make_request(seq_id, list(range(10))))
    with pytest.raises(QueueFullError) as caught:
        backlog.check_message(message)
    assert caught.value.param == param
    assert all(each in caught.value.message for each in words)
    assert caught.value.retry_after_seconds >= 1
    assert len(backlog) == 6, "no part of it was accepted"


def test_requests_at_the_limit_and_accepted_ones_may_wait():
    backlog = QueueLimits(QueueCapacity(9, 100), FakeClock())
    for seq_id in range(6):
        backlog.count_request(make_request(seq_id, list(range(10))))
    backlog.check_message(request(n=3, prompt=[1] * 40))
    backlog.check_message(request(n=128, prompt=[1] * 1000, accepted=True))


def test_an_empty_queue_takes_anything():
    QueueLimits(QueueCapacity(1, 1), FakeClock()).check_message(request(n=128, prompt=[1] * 1000))


def test_no_limits():
    backlog = QueueLimits(QueueCapacity(), FakeClock())
    backlog.count_request(make_request(1, [1] * 10))
    backlog.check_message(request(n=128, prompt=[1] * 1000))


def fill(backlog, tenant, number, first_seq_id):
    for seq_id in range(first_seq_id, first_seq_id + number):
        backlog.count_request(make_request(seq_id, [1] * 10, tenant=tenant))


def is_full_for(backlog, tenant, **fields):
    try:
        backlog.check_message(request(tenant=tenant, **fields))
    except QueueFullError:
        return True
    return False


def test_a_flood_of_one_tenant_excludes_no_other():
    backlog = QueueLimits(QueueCapacity(10, 0), FakeClock())
    fill(backlog, 1, 10, 0)
    assert is_full_for(backlog, 1)
    assert not is_full_for(backlog, 2, n=9), "the tenant has no queued requests"
    fill(backlog, 2, 4, 10)
    assert not is_full_for(backlog, 2)
    assert is_full_for(backlog, 2, n=2), "half of the limit is its share"
    fill(backlog, 2, 1, 14)
    assert is_full_for(backlog, 2)
    assert not is_full_for(backlog, 3, n=3)
    fill(backlog, 3, 3, 15)
    assert is_full_for(backlog, 3), "now there are three"
    fill(backlog, 4, 2, 18)
    assert is_full_for(backlog, 5), "twice the limit is queued"


def test_queued_tokens_are_shared_among_tenants():
    backlog = QueueLimits(QueueCapacity(0, 100), FakeClock())
    fill(backlog, 1, 10, 0)
    assert is_full_for(backlog, 1)
    assert not is_full_for(backlog, 2, prompt=[1] * 500)
    fill(backlog, 2, 4, 10)
    assert not is_full_for(backlog, 2, prompt=[1] * 10)
    assert is_full_for(backlog, 2, prompt=[1] * 11)


def test_a_prompt_that_choices_cannot_share_counts_for_each_of_them():
    backlog = QueueLimits(QueueCapacity(0, 100), FakeClock(), shares_prompts=False)
    for choice in range(3):
        backlog.count_request(make_request(choice, [1] * 20, choice=choice))
    assert backlog.num_tokens == 60
    assert not is_full_for(backlog, 0, n=2, prompt=[1] * 20)
    assert is_full_for(backlog, 0, n=3, prompt=[1] * 20)


def test_a_tenant_that_has_left_has_no_share():
    engine = EngineHarness()
    backlog = engine.scheduler.queue_limits
    queue(engine, [1, 2], tenant=7)
    queue(engine, [3, 4], tenant=8)
    assert len(backlog._by_tenant) == 2
    engine.step()
    assert not backlog._by_tenant


class TestPace:
    """The estimate is the time to empty the queue at the recent rate, within bounds."""

    def setup_method(self):
        self.clock = FakeClock()
        self.pace = QueueDrainRate(self.clock)
        self.pace.on_first_waiting()

    def leave(self, number: int, seconds: float) -> None:
        """Finish requests one after another with this interval in seconds."""
        for _ in range(number):
            self.clock.now += seconds
            self.pace.on_request_left()

    def test_a_guess_before_anyone_has_left(self):
        assert self.pace.seconds_for(1000) == 5
        self.clock.now += 12.5
        assert self.pace.seconds_for(1000) == 13, "no request has finished in this time"
        self.clock.now += 1000
        assert self.pace.seconds_for(1000) == 60

    def test_the_rate_follows_recent_departures(self):
        self.leave(10, 0.5)
        assert self.pace.seconds_for(10) == 5
        assert self.pace.seconds_for(31) == 16
        assert self.pace.seconds_for(1) == 1
        assert self.pace.seconds_for(10**6) == 60

    def test_time_without_a_queue_does_not_count(self):
        self.leave(10, 0.5)
        self.pace.on_empty()
        self.clock.now += 3600
        assert self.pace.seconds_for(10) == 5
        self.pace.on_first_waiting()
        assert self.pace.seconds_for(10) == 5

    def test_old_samples_are_forgotten(self):
        self.leave(10, 3.0)
        self.leave(400, 0.25)
        assert 4 <= self.pace.seconds_for(16) <= 5
