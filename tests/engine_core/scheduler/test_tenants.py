"""Usage counters of tenants: charging, lifting, forgetting."""

import pytest

from engine_core.scheduler.features.tenant_usage import (
    MAX_ABSENT_TENANTS,
    OUTPUT_WEIGHT,
    TenantUsage,
)
from tests.fakes.engine_harness import EngineHarness

CREDIT = 100


class Book:
    """Usage counters, and requests that a test schedules."""

    def __init__(self, credit=CREDIT):
        self.ledger = TenantUsage(credit)
        self.engine = EngineHarness()

    def waiting(self, tenant, length=10):
        request = self.engine.add_one(list(range(length)), tenant=tenant)
        self.ledger.register_request(request)
        self.ledger.begin_waiting(tenant)
        return request

    def running(self, tenant, length=10, chunk=None):
        request = self.waiting(tenant, length)
        self.ledger.begin_running(request, chunk or length)
        return request

    def steps(self, number):
        for _ in range(number):
            self.ledger.begin_step()

    def ahead(self, one, other):
        """Return how much more `one` was served than `other`."""
        return self.ledger.served(one) - self.ledger.served(other)


@pytest.fixture
def book():
    return Book()


def test_input_is_charged_when_it_is_admitted_and_output_step_by_step(book):
    request = book.waiting(1, length=30)
    before = book.ledger.served(1)
    book.ledger.begin_running(request, 30)
    assert book.ledger.served(1) - before == 30
    book.steps(5)
    assert book.ledger.served(1) - before == 30 + 5 * OUTPUT_WEIGHT


def test_what_the_cache_holds_costs_nothing(book):
    request = book.waiting(1, length=30)
    before = book.ledger.served(1)
    request.num_computed_tokens = 24
    book.ledger.begin_running(request, 6)
    assert book.ledger.served(1) - before == 6


def test_a_prompt_of_several_chunks_decodes_when_one_token_is_left(book):
    request = book.running(1, length=30, chunk=16)
    before = book.ledger.served(1)
    assert list(book.ledger.prefills.values()) == [request]
    request.num_computed_tokens = 16
    book.steps(1)
    assert book.ledger.prefills
    request.num_computed_tokens = 30
    book.steps(1)
    assert not book.ledger.prefills
    assert book.ledger.served(1) == before
    book.steps(1)
    assert book.ledger.served(1) == before + OUTPUT_WEIGHT


def test_a_preemption_is_not_charged(book):
    request = book.running(1, length=30)
    book.steps(3)
    served = book.ledger.served(1)
    book.ledger.end_running(request)
    request.num_preemptions = 1
    book.steps(3)
    book.ledger.begin_running(request, 30)
    assert book.ledger.served(1) == served
    assert book.ledger.num_tenants == 1


def test_a_returning_tenant_is_behind_by_at_most_the_credit(book):
    book.running(1, length=500)
    book.waiting(2)
    assert book.ahead(1, 2) == CREDIT
    book.steps(1000)
    book.ledger.begin_waiting(2)  # the tenant appears to have had no waiting request
    assert book.ahead(1, 2) == CREDIT


def test_a_tenant_behind_by_less_than_the_credit_keeps_its_deficit(book):
    book.running(1, length=80)
    book.running(2, length=10)
    ahead = book.ahead(1, 2)
    assert 0 < ahead < CREDIT
    book.ledger.begin_waiting(2)
    assert book.ahead(1, 2) == ahead


def test_tenants_that_arrive_together_start_equal(book):
    book.waiting(1)
    book.waiting(2)
    assert book.ahead(1, 2) == 0


def test_the_debt_of_an_absent_tenant_is_kept(book):
    heavy = book.running(1, length=80)
    book.running(2, length=1)
    ahead = book.ahead(1, 2)
    book.ledger.unregister_request(heavy)
    assert book.ledger.num_tenants == 1
    book.waiting(1)
    assert book.ahead(1, 2) == ahead


def test_the_number_of_absent_tenants_kept_is_bounded(book):
    for tenant in range(MAX_ABSENT_TENANTS + 1):
        book.ledger.unregister_request(book.running(tenant, length=5))
    assert book.ledger.num_tenants == 0
    for tenant in (0, 1, MAX_ABSENT_TENANTS, -1):
        book.waiting(tenant)
    assert [book.ahead(tenant, -1) for tenant in (0, 1, MAX_ABSENT_TENANTS)] == [0, 5, 5]


def test_new_tenants_without_end_do_not_stay_ahead_of_one_that_waits(book):
    """Each starts with the credit, but the virtual clock advances with their service."""
    book.running(1, length=400)
    waits = book.waiting(1)
    number, served = 0, 0
    while True:
        number += 1
        newcomer = book.waiting(number + 10, length=50)
        if book.ahead(waits.tenant, newcomer.tenant) <= 0:
            break
        book.ledger.begin_running(newcomer, 50)
        book.ledger.unregister_request(newcomer)
        served += 50
        assert served < 10 * CREDIT


def test_most_served_considers_running_tenants_only(book):
    assert book.ledger.most_served() == float("-inf")
    heavy = book.running(1, length=90)
    book.running(2, length=20)
    assert book.ledger.most_served() == book.ledger.served(1)
    book.ledger.end_running(heavy)
    assert book.ledger.most_served() == book.ledger.served(2)
