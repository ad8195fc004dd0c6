"""Lifetimes of sampled blocks, on a fake clock."""

import random

import pytest

from engine_core.kv_cache.events import MAX_GAPS, ResidencyMeter
from engine_core.kv_cache.pool import BlockPool
from proto.messages.stats import KVEviction
from tests.fakes.kv_requests import Requests, make_manager


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Setup:
    def __init__(self, one_in: int = 1, num_blocks: int = 3) -> None:
        self.clock = Clock()
        self.meter = ResidencyMeter(one_in, self.clock, random.Random(1).random)
        self.manager = make_manager(num_blocks, 4, residency=self.meter)
        self.requests = Requests(self.manager)

    def serve(self, text: str) -> None:
        request = self.requests.make(text)
        assert self.requests.schedule(request) is not None
        self.manager.free(request)


def test_content_that_was_never_found_was_idle_all_its_life():
    """MET-03."""
    kv = Setup()
    kv.serve("AAAA|BBBB")
    kv.clock.now += 5
    kv.serve("CCCC|DDDD")
    assert kv.manager.pop_evictions() == [KVEviction(5.0, 5.0)] * 2
    assert kv.manager.pop_evictions() == []


def test_gaps_lie_between_uses_and_idle_after_the_last():
    kv = Setup(num_blocks=4)
    kv.serve("AAAA|x")
    for gap in (2, 3):
        kv.clock.now += gap
        kv.serve("AAAA|x")
    kv.clock.now += 7
    kv.serve("BBBB|CCCC|DDDD")
    assert KVEviction(12.0, 7.0, [2.0, 3.0]) in kv.manager.pop_evictions()


def test_what_could_not_be_found_does_not_count():
    kv = Setup()
    kv.serve("AAA")
    kv.serve("BBB")
    kv.serve("CCC")
    assert kv.manager.pop_evictions() == []


def test_a_reset_and_a_withdrawal_forget():
    kv = Setup()
    kv.serve("AAAA|BBBB")
    assert kv.manager.reset_prefix_cache()
    request = kv.requests.make("CCCC|D")
    kv.requests.schedule(request)
    kv.manager.uncache_after(request, 0)
    kv.manager.free(request)
    kv.serve("EEEE|FFFF")
    assert kv.manager.pop_evictions() == []


def test_the_gaps_of_a_block_are_bounded():
    kv = Setup(num_blocks=4)
    for _ in range(MAX_GAPS + 10):
        kv.serve("AAAA|x")
    kv.serve("BBBB|CCCC|DDDD")
    longest = max(kv.manager.pop_evictions(), key=lambda each: len(each.reuse_gaps))
    assert len(longest.reuse_gaps) == MAX_GAPS


@pytest.mark.parametrize(("one_in", "low", "high"), [(1, 1000, 1000), (2, 400, 600)])
def test_one_block_in_so_many_is_measured(one_in, low, high):
    """MET-02."""
    kv = Setup(one_in, num_blocks=2)
    for number in range(1001):
        request = kv.requests.make([number] * 4)
        kv.requests.schedule(request)
        kv.manager.free(request)
    assert low <= len(kv.manager.pop_evictions()) <= high


def test_the_pool_has_no_observer_when_residency_is_disabled():
    kv = Setup(one_in=0)
    assert type(kv.manager.pool) is BlockPool
    kv.serve("AAAA|BBBB")
    kv.serve("CCCC|DDDD")
    assert kv.manager.pop_evictions() == []
