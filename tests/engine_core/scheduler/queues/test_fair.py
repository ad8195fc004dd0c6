"""Order of tenants: the one served least goes first, each in the order of its own queue."""

import random

import pytest

from engine_core.scheduler.queues.fair import FairQueue
from engine_core.scheduler.queues.policies import FCFSQueue, PriorityQueue
from tests.fakes.engine_harness import EngineHarness


class FakeTenantStats:
    """Usage counters that a test sets; records calls."""

    def __init__(self, **served):
        self.counters = {int(name.removeprefix("t")): float(n) for name, n in served.items()}
        self.entered, self.lined_up, self.stopped = [], [], []

    def served(self, tenant):
        return self.counters.get(tenant, 0.0)

    def register_request(self, request):
        self.entered.append(request)

    def begin_waiting(self, tenant):
        self.lined_up.append(tenant)

    def end_running(self, request):
        self.stopped.append(request)


def first_come(standings):
    return FairQueue(FCFSQueue, lambda request: 0, standings)


def by_priority(standings):
    return FairQueue(PriorityQueue, lambda request: request.priority, standings)


def requests_of(tenants, priorities=None):
    engine = EngineHarness()
    priorities = priorities or [0] * len(tenants)
    return [
        engine.add_one([1], tenant=tenant, priority=priority, arrival_time=float(number))
        for number, (tenant, priority) in enumerate(zip(tenants, priorities, strict=True))
    ]


def filled(queue, requests):
    for each in requests:
        queue.add_request(each)
    return queue


def test_the_tenant_served_least_goes_first_and_charges_change_the_order():
    standings = FakeTenantStats(t1=10, t2=20, t3=5)
    one, other, two, three = requests = requests_of([1, 1, 2, 3])
    queue = filled(first_come(standings), requests)
    assert queue.pop_request() is three
    assert queue.peek_request() is one
    assert queue.pop_request() is one
    standings.counters[1] = 30
    assert queue.pop_request() is two
    assert queue.pop_request() is other
    assert len(queue) == queue.num_ready == 0


def test_requests_of_one_tenant_keep_their_order():
    requests = requests_of([4] * 4, priorities=[2, 0, 1, 0])
    assert list(filled(first_come(FakeTenantStats()), requests)) == requests
    queue = filled(by_priority(FakeTenantStats()), requests)
    assert [queue.pop_request() for _ in requests] == [requests[each] for each in (1, 3, 2, 0)]


def test_order_is_priority_then_fairness_then_arrival():
    standings = FakeTenantStats(t1=100, t2=0)
    requests = requests_of([1, 1, 2, 2], priorities=[0, 1, 1, 2])
    queue = filled(by_priority(standings), requests)
    assert list(queue) == [requests[each] for each in (0, 2, 1, 3)]
    assert [queue.pop_request() for _ in requests] == [requests[each] for each in (0, 2, 1, 3)]


def test_a_request_of_higher_priority_moves_its_tenant_up():
    standings = FakeTenantStats(t1=100, t2=0)
    slow, fast, urgent = requests_of([1, 2, 1], priorities=[3, 2, 1])
    queue = filled(by_priority(standings), [slow, fast])
    assert queue.peek_request() is fast
    queue.add_request(urgent)
    assert [queue.pop_request() for _ in range(3)] == [urgent, fast, slow]


def test_at_equal_service_the_head_that_arrived_first_goes_first():
    requests = requests_of([9, 3, 5])
    queue = filled(first_come(FakeTenantStats()), requests)
    assert [queue.pop_request() for _ in requests] == requests


def test_arrivals_report_whether_the_tenants_queue_was_empty():
    standings = FakeTenantStats()
    queue = first_come(standings)
    first, second = requests = requests_of([7, 7])
    filled(queue, requests)
    assert standings.entered == requests
    assert standings.lined_up == [7]
    queue.park_request(first)
    queue.park_request(second)
    queue.unpark_request(second)
    assert standings.lined_up == [7, 7]
    queue.requeue_preempted(queue.pop_request())
    assert standings.stopped == [second]
    assert standings.lined_up == [7, 7, 7]


def test_a_tenant_with_only_blocked_requests_is_skipped():
    held, other = requests_of([1, 2])
    queue = filled(first_come(FakeTenantStats(t2=50)), [held, other])
    queue.park_request(held)
    assert queue.peek_request() is other
    assert (queue.num_ready, len(queue)) == (1, 2)
    queue.unpark_request(held)
    assert queue.peek_request() is held
    queue.remove_request(held)
    assert queue.pop_request() is other
    with pytest.raises(KeyError):
        queue.remove_request(held)


def test_thousands_of_aborting_tenants_leave_no_state():
    queue = first_come(FakeTenantStats())
    stays = requests_of([0])[0]
    queue.add_request(stays)
    for request in requests_of(range(1, 500)):
        queue.add_request(request)
        queue.remove_request(request)
    assert len(queue._heads._heap) < 100
    assert len(queue._queues) == 1
    assert queue.pop_request() is stays


@pytest.mark.parametrize("make_queue", [first_come, by_priority])
@pytest.mark.parametrize("seed", range(4))
def test_the_head_agrees_with_a_search_through_all_queues(make_queue, seed):
    """Counters grow between any two operations, as those of running tenants do."""
    rng = random.Random(seed)
    standings = FakeTenantStats()
    queue = make_queue(standings)
    spare = requests_of(rng.choices(range(6), k=40), rng.choices(range(3), k=40))
    ready, aside = [], []

    def rank(request):
        return queue._priority_key(request), standings.served(request.tenant)

    for _ in range(600):
        kind = rng.randrange(6)
        if kind == 0 and spare:
            ready.append(spare.pop(rng.randrange(len(spare))))
            queue.add_request(ready[-1])
        elif kind == 1 and ready:
            least = min(map(rank, ready))
            first = queue.pop_request()
            assert rank(first) == least
            ready.remove(first)
            (queue.requeue_preempted if rng.random() < 0.5 else queue.add_request)(first)
            ready.append(first)
        elif kind == 2 and ready:
            aside.append(ready.pop(rng.randrange(len(ready))))
            queue.park_request(aside[-1])
        elif kind == 3 and aside:
            ready.append(aside.pop(rng.randrange(len(aside))))
            queue.unpark_request(ready[-1])
        elif kind == 4 and ready + aside:
            gone = rng.choice(ready + aside)
            (ready if gone in ready else aside).remove(gone)
            queue.remove_request(gone)
            spare.append(gone)
        else:
            tenant = rng.randrange(6)
            standings.counters[tenant] = standings.served(tenant) + rng.random()
        assert (queue.num_ready, len(queue)) == (len(ready), len(ready) + len(aside))
        if ready:
            assert rank(queue.peek_request()) == min(map(rank, ready))
