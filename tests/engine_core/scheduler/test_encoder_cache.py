"""Encoder outputs in the workers' memory, and how many rows a step computes."""

import pytest

from engine_core.request import RequestStatus
from engine_core.scheduler.features.encoder_cache import (
    LONGEST_SECONDS,
    PARTS,
    EncoderBudget,
    EncoderCacheManager,
)
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.images import picture


def requests(number, status=RequestStatus.RUNNING):
    engine = EngineHarness()
    found = [engine.add_one([index]) for index in range(number)]
    for request in found:
        request.status = status
    return found


def encoded(cache, number, num_embeds, request, *, is_confirmed=True, is_urgent=False):
    """Encode a picture for a request; None without room."""
    feature = picture(number, num_embeds)
    output = cache.begin_output(feature, request, 0, is_urgent=is_urgent)
    if output is not None:
        cache.advance(output, float(num_embeds))
        output.is_confirmed = is_confirmed
    assert cache.check() == []
    return output


def hashes(*numbers):
    return [picture(number, 1).mm_hash for number in numbers]


def test_an_output_without_claims_stays_until_its_rows_are_needed():
    """The least recently used one goes first."""
    cache, (one,) = EncoderCacheManager(10), requests(1)
    outputs = [encoded(cache, number, 4, one) for number in (1, 2)]
    for output in outputs:
        cache.release(one.seq_id, output)
    assert (cache.num_free_rows, cache.pop_freed()) == (2, [])
    cache.claim(one, outputs[0])
    cache.release(one.seq_id, outputs[0])
    encoded(cache, 3, 3, one)
    assert cache.pop_freed() == hashes(2)
    assert [output.feature.mm_hash for output in cache] == hashes(1, 3)
    assert cache.num_free_rows == 3


def test_an_output_has_all_that_claim_it():
    cache, (one, other) = EncoderCacheManager(10), requests(2)
    output = encoded(cache, 1, 8, one)
    cache.claim(other, output)
    cache.release(one.seq_id, output)
    assert cache.claims_of(other.seq_id) == [output]
    assert not cache.claims_of(one.seq_id)
    assert encoded(cache, 2, 4, one) is None, "rows of a running request were taken"
    cache.release(other.seq_id, output)
    assert encoded(cache, 2, 4, one) is not None


@pytest.mark.parametrize(
    ("status", "for_parked", "for_running"),
    [
        (RequestStatus.RUNNING, False, False),
        (RequestStatus.WAITING, False, True),
        (RequestStatus.PREEMPTED, False, True),
        (RequestStatus.WAITING_FOR_ENCODER, True, True),
        (RequestStatus.WAITING_FOR_RESUME, True, True),
    ],
)
def test_rows_are_taken_from_requests_that_wait(status, for_parked, for_running):
    for is_urgent, may in ((False, for_parked), (True, for_running)):
        cache, (one, other) = EncoderCacheManager(10), requests(2, status)
        encoded(cache, 1, 8, one)
        assert (encoded(cache, 2, 4, other, is_urgent=is_urgent) is not None) is may
        assert cache.pop_freed() == (hashes(1) if may else [])
        assert bool(cache.claims_of(one.seq_id)) is not may


def test_a_request_does_not_lose_one_image_to_another_of_its_own():
    cache, (one,) = EncoderCacheManager(10), requests(1, RequestStatus.WAITING_FOR_ENCODER)
    encoded(cache, 1, 8, one)
    assert encoded(cache, 2, 4, one, is_urgent=True) is None


def test_nothing_is_evicted_in_vain():
    cache, (one, other) = EncoderCacheManager(10), requests(2)
    kept = encoded(cache, 1, 4, one)
    encoded(cache, 2, 5, other)
    cache.release(one.seq_id, kept)
    assert encoded(cache, 3, 6, one) is None
    assert cache.pop_freed() == []
    assert len(cache) == 2


def test_a_partial_output_goes_with_its_last_claim():
    """It frees the one place; workers that have begun must forget it."""
    cache, (one, other) = EncoderCacheManager(10), requests(2)
    output = cache.begin_output(picture(1, 8), one, 0, is_urgent=False)
    cache.advance(output, 2.5)
    cache.claim(other, output)
    cache.release(one.seq_id, output)
    assert cache.partial is output
    cache.release(other.seq_id, output)
    assert (cache.partial, cache.num_free_rows, cache.pop_freed()) == (None, 10, hashes(1))
    cache.release(one.seq_id, cache.begin_output(picture(1, 8), one, 0, is_urgent=False))
    assert cache.pop_freed() == [], "workers know nothing of it"


def test_an_output_whose_result_has_not_arrived_stays():
    cache, (one,) = EncoderCacheManager(10), requests(1)
    output = encoded(cache, 1, 8, one, is_confirmed=False)
    cache.release(one.seq_id, output)
    assert encoded(cache, 2, 4, one) is None
    assert not cache.reset()
    output.is_confirmed = True
    assert encoded(cache, 2, 4, one) is not None


def test_a_reset_forgets_all_outputs_or_none():
    cache, (one,) = EncoderCacheManager(10), requests(1)
    first = encoded(cache, 1, 2, one)
    cache.release(one.seq_id, encoded(cache, 2, 2, one))
    assert not cache.reset()
    assert len(cache) == 2
    cache.release(one.seq_id, first)
    assert cache.reset()
    assert (len(cache), cache.num_free_rows) == (0, 10)
    assert sorted(cache.pop_freed()) == hashes(1, 2)


def test_new_workers_hold_nothing():
    cache, (one,) = EncoderCacheManager(10), requests(1)
    encoded(cache, 1, 2, one)
    cache.begin_output(picture(2, 4), one, 1, is_urgent=False)
    cache.forget_workers()
    assert (len(cache), cache.partial, cache.num_free_rows) == (0, None, 10)
    assert not cache.claiming
    assert not cache.has_freed


def test_the_check_finds_what_is_inconsistent():
    cache, (one,) = EncoderCacheManager(10), requests(1)
    output = encoded(cache, 1, 2, one)
    cache.num_free_rows -= 1
    assert len(cache.check()) == 1
    output.users.clear()
    assert len(cache.check()) == 3


def test_a_fixed_budget_does_not_depend_on_times():
    budget = EncoderBudget(7)
    budget.learn(1.0, 100.0)
    assert budget.rows(0.001) == 7.0


def test_a_budget_follows_the_time_of_a_row():
    budget = EncoderBudget(None)
    assert budget.rows(0.02) == 1.0, "the time of a row is unknown"
    budget.learn(1.0, 0.004)
    assert budget.rows(0.02) == pytest.approx(5.0)
    assert budget.rows(float("inf")) == pytest.approx(LONGEST_SECONDS / 0.004)
    for _ in range(20):
        budget.learn(8.0, 8.0)
    assert budget.rows(float("inf")) == pytest.approx(0.5, rel=0.01)
    assert budget.rows(0.02) == 1 / PARTS, "a step makes progress"
    before = budget.rows(float("inf"))
    budget.learn(0.0, 1.0)
    budget.learn(1.0, 0.0)
    assert budget.rows(float("inf")) == before
