"""The order of preemption, compared with a search through all running requests."""

import random

import pytest

from engine_core.scheduler.features.tenant_usage import TenantUsage
from engine_core.scheduler.preemption import PreemptionOrder, index_of
from engine_core.scheduler.queues.policies import FairSchedulingPolicy
from tests.fakes.engine_harness import EngineHarness


class Book:
    """A running list with its preemption order and usage counters; `served` is random."""

    def __init__(self, policy: str) -> None:
        self.ledger = TenantUsage(0)
        self.policy = FairSchedulingPolicy(policy, self.ledger)
        self.victims = PreemptionOrder(self.policy)
        self.running = []
        self.engine = EngineHarness()

    def admit(self, tenant, priority, num_tokens):
        request = self.engine.add_one(list(range(num_tokens)), tenant=tenant, priority=priority)
        self.ledger.register_request(request)
        self.running.append(request)
        self.victims.add_running(request)
        self.ledger.begin_running(request, num_tokens)
        return request

    def remove(self, request):
        del self.running[index_of(self.running, request)]
        self.victims.remove_running(request)
        self.ledger.unregister_request(request)

    def to_the_end(self, requests):
        self.running[:] = [each for each in self.running if each not in requests] + requests
        self.victims.move_to_end(requests)

    def searched(self, by_priority, served_above=float("-inf")):
        """Return the victim by the rule: rank of the tenant, then the last request of that rank."""
        candidates = [
            each for each in self.running if self.ledger.served(each.tenant) > served_above
        ]
        if not candidates:
            return None
        last = max(self.policy.admission_key(each) for each in candidates)
        equals = [each for each in candidates if self.policy.admission_key(each) == last]
        return max(equals, key=lambda each: each.order) if by_priority else equals[-1]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_tenants", [1, 7])
def test_victims_agree_with_a_search_through_all_running_requests(policy, num_tenants):
    draw = random.Random(num_tenants)
    book = Book(policy)
    num_found = 0
    for _ in range(600):
        kind = draw.random()
        if kind < 0.45 or not book.running:
            # Few lengths, so that tenants are often served equally.
            book.admit(draw.randrange(num_tenants), draw.randrange(3), draw.choice([1, 2, 4]))
        elif kind < 0.7:
            book.remove(draw.choice(book.running))
        elif kind < 0.8:
            book.to_the_end(draw.sample(book.running, draw.randint(1, len(book.running))))
        elif kind < 0.9:
            book.remove(book.victims.next_victim())
        else:
            book.ledger.begin_step()
        assert book.victims.next_victim() is book.searched(policy == "priority")
        level = book.ledger.most_served() - draw.choice([0, 1, 3, 10])
        found = book.victims.next_victim(served_above=level)
        assert found is book.searched(policy == "priority", level)
        num_found += found is not None
        for each in draw.sample(book.running, min(3, len(book.running))):
            assert book.running[index_of(book.running, each)] is each
    assert num_found > 200


@pytest.mark.interpreted
def test_a_victim_is_found_with_one_look_per_tenant(monkeypatch):
    """Independent of the number of its running requests."""
    book = Book("fcfs")
    for number in range(500):
        book.admit(number % 3, 0, 2)
    looks = []

    def served(tenant):
        looks.append(tenant)
        return book.ledger.served(tenant)

    monkeypatch.setattr(book.policy, "served", served)
    assert book.victims.next_victim() is book.running[-1]
    assert len(looks) == 3


def test_a_removed_request_leaves_no_state():
    book = Book("priority")
    for number in range(1000):
        book.remove(book.admit(0, number % 5, 1))
    survivor = book.admit(0, 0, 1)
    assert book.victims.next_victim() is survivor
