"""Drafts by n-grams and suffixes: from the request, and from outputs of the same tenant only."""

import random

import pytest

from engine_core.block_hashing import ExtraKeys
from engine_core.request import RequestStatus
from engine_core.speculation.lookup import (
    STEP_TOKENS,
    IndexMemory,
    NgramProposer,
    SuffixProposer,
    length_key,
)


def salted(salt: str | None) -> dict[str, ExtraKeys]:
    return {"extra_keys": ExtraKeys(salt)}


@pytest.fixture
def make_suffix(make_index):
    def factory(**changes) -> SuffixProposer:
        settings = {"depth": 64, "max_tokens": 16, "factor": 1.0, "min_probability": 0.1}
        return SuffixProposer(make_index, **(settings | {"max_requests": 100} | changes))

    return factory


def append(request, *token_ids) -> None:
    request.all_token_ids.extend(token_ids)


def finish(proposer, request) -> None:
    request.status = RequestStatus.FINISHED_STOPPED
    proposer.end_request(request)


def serve(proposer, request, outputs) -> None:
    """Run a request to its end with these outputs."""
    proposer.begin_request(request)
    append(request, *outputs)
    proposer.add_outputs(request, len(outputs))
    finish(proposer, request)


def tokens_of(draft) -> list[int]:
    return [] if draft is None else draft.token_ids


def test_suffix_copies_from_the_prompt_and_from_outputs(make_suffix, make_request):
    proposer = make_suffix()
    request = make_request([*range(100, 120), 7, 103, 104])
    assert proposer.begin_request(request)
    assert tokens_of(proposer.propose(request, 16)) == [105, 106]
    append(request, 105, 106)
    proposer.add_outputs(request, 2)
    draft = proposer.propose(request, 3)
    assert draft.token_ids == [107, 108, 109]
    assert draft.acceptance_probs == sorted(draft.acceptance_probs, reverse=True)
    assert 0.0 < draft.acceptance_probs[-1] < draft.acceptance_probs[0] < 1.0
    append(request, 1, 2, 3, 4, 1, 2)
    proposer.add_outputs(request, 6)
    assert tokens_of(proposer.propose(request, 16)) == [3, 4]


def test_ngram_has_a_shortest_match_and_a_longest_draft(make_index, make_request):
    proposer = NgramProposer(make_index, 3, 5, 4)
    request = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3])
    proposer.begin_request(request)
    assert proposer.propose(request, 16) is None
    append(request, 4)
    proposer.add_outputs(request, 1)
    assert tokens_of(proposer.propose(request, 16)) == [5, 6, 7, 8]
    assert tokens_of(proposer.propose(request, 2)) == [5, 6]


@pytest.mark.parametrize("is_finished", [True, False])
def test_outputs_of_finished_requests_are_drafts_for_later_ones(
    make_suffix, make_request, is_finished
):
    """A preempted request begins again, and its outputs are not counted twice."""
    proposer = make_suffix()
    first = make_request([1, 2, 3])
    proposer.begin_request(first)
    append(first, 50, 51, 52, 53)
    proposer.add_outputs(first, 4)
    first.status = RequestStatus.FINISHED_ABORTED if is_finished else RequestStatus.PREEMPTED
    proposer.end_request(first)
    later = make_request([9, 2, 3])
    proposer.begin_request(later)
    expected = [50, 51] if is_finished else []
    assert tokens_of(proposer.propose(later, 16)) == expected


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ({"tenant": 1}, {"tenant": 1}, True),
        ({"tenant": 1}, {"tenant": 2}, False),
        ({"tenant": 0}, {"tenant": 2}, False),
        (
            {"tenant": 1, **salted("a")},
            {"tenant": 1, **salted("a")},
            True,
        ),
        (
            {"tenant": 1, **salted("a")},
            {"tenant": 1, **salted("b")},
            False,
        ),
        ({"tenant": 1, **salted("a")}, {"tenant": 1}, False),
    ],
)
def test_tenants_and_salts_are_apart(make_suffix, make_request, first, second, shares):
    proposer = make_suffix()
    serve(proposer, make_request([1, 2, 3], **first), [50, 51, 52, 53])
    request = make_request([9, 2, 3], **second)
    proposer.begin_request(request)
    assert bool(tokens_of(proposer.propose(request, 16))) is shares
    proposer.forget_outputs()
    assert proposer.propose(request, 16) is None
    assert proposer.num_output_bytes == 0


def test_the_longer_match_wins_between_request_and_earlier_outputs(make_suffix, make_request):
    proposer = make_suffix()
    serve(proposer, make_request([1]), [10, 11, 12, 13, 14, 15])
    request = make_request([12, 13, 77, 78, 5, 10, 11, 12, 13])
    proposer.begin_request(request)
    assert tokens_of(proposer.propose(request, 16)) == [14, 15]
    request = make_request([10, 11, 12, 13, 77, 78, 5, 3, 10, 11, 12, 13])
    proposer.begin_request(request)
    assert tokens_of(proposer.propose(request, 16)) == [77, 78, 5, 3]


def test_the_oldest_outputs_of_a_tenant_are_evicted(make_suffix, make_request):
    proposer = make_suffix(max_requests=2)
    for first in (100, 200, 300):
        serve(proposer, make_request([1]), range(first, first + 8))
    found = []
    for first in (100, 200, 300):
        request = make_request([first, first + 1, first + 2])
        proposer.begin_request(request)
        found.append(bool(tokens_of(proposer.propose(request, 16))))
    assert found == [False, True, True]


def test_no_outputs_are_kept_if_none_may_be(make_suffix, make_request):
    proposer = make_suffix(max_requests=0)
    serve(proposer, make_request([1, 2, 3]), [50, 51])
    assert proposer.num_output_bytes == 0


def test_memory_of_outputs_is_bounded(make_suffix, make_request):
    """The limit holds for any number of tenants; the outputs of those served last are kept."""
    limit = 400_000
    proposer = make_suffix(max_tenant_tokens=2048, max_output_bytes=limit)
    generator = random.Random(1)
    one_tenant = 0
    for number in range(60):
        outputs = [generator.randrange(1000) for _ in range(500)]
        serve(proposer, make_request([1], tenant=1), outputs)
        one_tenant = max(one_tenant, proposer.num_output_bytes)
        if number == 30:
            after_30 = one_tenant
    assert one_tenant == after_30 < 2048 * 40
    for tenant in range(2, 40):
        serve(proposer, make_request([tenant, tenant], tenant=tenant), range(100, 400))
        assert proposer.num_output_bytes <= limit
    for tenant, is_kept in ((2, False), (39, True)):
        request = make_request([tenant, tenant], tenant=tenant)
        proposer.begin_request(request)
        assert bool(tokens_of(proposer.propose(request, 16))) is is_kept


def test_a_request_leaves_nothing_behind(make_suffix, make_index, make_request):
    suffix, ngram = make_suffix(), NgramProposer(make_index, 2, 4, 8)
    for proposer in (suffix, ngram):
        for status in (RequestStatus.PREEMPTED, RequestStatus.FINISHED_LENGTH):
            request = make_request([1, 2, 3, 1, 2])
            proposer.begin_request(request)
            request.status = status
            proposer.end_request(request)
    assert len(suffix._indexes) == len(ngram._indexes) == 0
    assert suffix._indexes._memory.num_bytes == ngram._indexes._memory.num_bytes == 0


def test_a_tenant_with_many_salts_evicts_its_own_outputs(make_suffix, make_request):
    proposer = make_suffix(max_output_bytes=200_000)
    serve(proposer, make_request([1, 2], tenant=1), range(100, 400))
    for salt in range(40):
        request = make_request([1, 2], tenant=2, **salted(str(salt)))
        serve(proposer, request, range(100, 400))
    assert 100_000 < proposer.num_output_bytes <= 200_000
    for tenant, salt, is_kept in ((1, None, True), (2, "0", False), (2, "39", True)):
        request = make_request([1, 2], tenant=tenant, **salted(salt))
        proposer.begin_request(request)
        assert bool(tokens_of(proposer.propose(request, 16))) is is_kept


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_a_long_prompt_is_indexed_in_parts(make_suffix, make_index, make_request, method):
    """Several requests take turns; tokens that come meanwhile are indexed with the rest."""
    proposer = make_suffix() if method == "suffix" else NgramProposer(make_index, 2, 4, 8)
    long = make_request([*range(1000, 1000 + 2 * STEP_TOKENS), 7, 1000, 1001])
    short = make_request([1, 2, 3, 1, 2])
    proposer.begin_request(long)
    proposer.begin_request(short)
    assert proposer.propose(long, 8) is proposer.propose(short, 8) is None
    append(long, 1002)
    proposer.add_outputs(long, 1)
    proposer.begin_step()
    assert proposer.propose(long, 8) is proposer.propose(short, 8) is None
    proposer.begin_step()
    assert tokens_of(proposer.propose(long, 2)) == [1003, 1004]
    assert tokens_of(proposer.propose(short, 1)) == [3]
    append(long, 1003)
    proposer.add_outputs(long, 1)
    assert tokens_of(proposer.propose(long, 2)) == [1004, 1005]
    ended = make_request(list(range(3 * STEP_TOKENS)))
    proposer.begin_request(ended)
    finish(proposer, ended)
    proposer.begin_step()
    assert not proposer._indexes._pending


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_memory_of_unfinished_requests_is_bounded(make_suffix, make_index, make_request, method):
    memory = IndexMemory(limit=50_000)
    proposer = (
        make_suffix(memory=memory)
        if method == "suffix"
        else NgramProposer(make_index, 2, 4, 8, memory)
    )
    requests = [make_request([1, 2, 3, 1, 2] * 40) for _ in range(20)]
    known = [request for request in requests if proposer.begin_request(request)]
    assert 0 < len(known) < 20
    assert 25_000 < memory.num_bytes <= memory.limit
    grown = known[0]
    for _ in range(40):
        append(grown, *range(1000))
        proposer.add_outputs(grown, 1000)
    assert memory.num_bytes <= memory.limit, "a request that outgrows the limit has no index"
    assert proposer.propose(grown, 8) is None
    for request in known:
        proposer.end_request(request)
    assert memory.num_bytes == 0


def test_a_request_that_outgrows_the_limit_before_it_is_indexed(make_index, make_request):
    """Memory was reserved for the prompt alone."""
    request = make_request(list(range(2 * STEP_TOKENS)))
    probe = IndexMemory()
    NgramProposer(make_index, 2, 4, 8, probe).begin_request(request)
    memory = IndexMemory(limit=probe.num_bytes)
    proposer = NgramProposer(make_index, 2, 4, 8, memory)
    assert proposer.begin_request(request)
    append(request, 1, 2)
    proposer.add_outputs(request, 2)
    for _ in range(3):
        proposer.begin_step()
    assert proposer.propose(request, 1) is None
    assert memory.num_bytes == 0


class FullIndex:
    """An index that has no memory for a second part."""

    def __init__(self, index) -> None:
        self._index = index
        self._num_parts = 0

    def __getattr__(self, name):
        return getattr(self._index, name)

    def lookup(self, source, max_tokens):
        return self._index.lookup(self._index, max_tokens)

    def extend(self, token_ids, start, end) -> None:
        self._num_parts += 1
        if self._num_parts > 1:
            raise MemoryError
        self._index.extend(token_ids, start, end)


def test_without_memory_for_a_part_a_request_has_no_drafts(make_index, make_request, caplog):
    proposer = NgramProposer(lambda *settings: FullIndex(make_index(*settings)), 2, 4, 8)
    long, short = make_request(list(range(2 * STEP_TOKENS))), make_request([1, 2, 3, 1, 2])
    proposer.begin_request(long)
    proposer.begin_request(short)
    proposer.begin_step()
    assert "out of memory" in caplog.text
    assert tokens_of(proposer.propose(short, 1)) == [3]
    assert proposer.propose(long, 1) is None
    assert len(proposer._indexes) == 1


def test_keys_of_lengths_grow_slowly():
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 24, 32, 48, 63, 64]
    keys = [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 9, 10]
    assert [length_key(length) for length in lengths] == keys
