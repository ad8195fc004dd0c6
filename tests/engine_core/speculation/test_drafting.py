"""Drafting as the scheduler uses it, with proposers that say what the test wants."""

import random
from types import SimpleNamespace

import pytest

from engine_core.core import EngineCore
from engine_core.request import RequestStatus
from engine_core.speculation.drafting import PROBE_SHARE, PROBE_TOKENS, Drafting, make_drafting
from engine_core.speculation.proposer import Draft
from proto.settings.config import ServeConfig, SpeculationConfig
from proto.settings.speculative_config import parse_speculative_config

LIMIT = 8


class FixedProposer:
    """Proposes the same tokens with the same acceptance probability for each."""

    def __init__(self, token_ids=(1, 2, 3, 4), acceptance_prob=0.9, name="suffix") -> None:
        self.name = name
        self.token_ids, self.acceptance_prob = list(token_ids), acceptance_prob
        self.calls = []

    def begin_step(self) -> None: ...

    def begin_request(self, request) -> bool:
        self.calls.append(("begin", request.seq_id))
        return True

    def add_outputs(self, request, num_new) -> None:
        self.calls.append(("outputs", request.seq_id, num_new))

    def propose(self, request, max_tokens) -> Draft | None:
        token_ids = self.token_ids[:max_tokens]
        if not token_ids:
            return None
        acceptance_probs = [
            self.acceptance_prob ** (position + 1) for position in range(len(token_ids))
        ]
        return Draft(token_ids, acceptance_probs, self.name)

    def end_request(self, request) -> None:
        self.calls.append(("end", request.seq_id))

    def forget_outputs(self) -> None:
        self.calls.append(("forget",))


def start(make_request, drafting, number=1, **changes):
    requests = [make_request([7, 8, 9], (5,), **changes) for _ in range(number)]
    for request in requests:
        drafting.add_request(request)
    return requests


def fill(drafting, requests) -> None:
    """As the scheduler does, for requests whose limit is that of max_tokens."""
    limits = [
        request.max_tokens - request.num_output_tokens - request.num_output_placeholders - 1
        for request in requests
    ]
    drafting.fill_drafts(requests, limits, 0)


def learn_costs(drafting, slope: float) -> None:
    for _ in range(20):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            drafting.learn_step(rows, 0.01 * (1 + slope * (rows - 1)))


def test_a_request_gets_a_draft(make_request):
    drafting = Drafting([FixedProposer()], LIMIT)
    learn_costs(drafting, 0.02)
    (request,) = start(make_request, drafting)
    fill(drafting, [request])
    assert request.spec_token_ids == [1, 2, 3, 4]


def test_the_proposer_with_the_highest_expectation_wins(make_request):
    """Also if what was learnt contradicts what the proposers expect."""
    wrong, right = FixedProposer((1, 1, 1, 1), 0.9, "a"), FixedProposer((2, 2, 2), 0.8, "b")
    drafting = Drafting([wrong, right], LIMIT)
    learn_costs(drafting, 0.02)
    (request,) = start(make_request, drafting)
    fill(drafting, [request])
    assert request.spec_token_ids == [1, 1, 1, 1]
    for _ in range(30):
        request.spec_token_ids = []
        fill(drafting, [request])
        num_accepted = 0 if request.spec_token_ids[:1] == [1] else 3
        drafting.record_verified(request, len(request.spec_token_ids), num_accepted)
    assert request.spec_token_ids == [2, 2, 2]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 100])
def test_a_draft_never_exceeds_what_a_request_may_have(make_request, max_tokens):
    """4 tokens are known, one of them an output; the step adds one more than it accepts."""
    drafting = Drafting([FixedProposer(range(20))], LIMIT)
    learn_costs(drafting, 0.0)
    (request,) = start(make_request, drafting, max_tokens=max_tokens)
    fill(drafting, [request])
    assert len(request.spec_token_ids) == max(0, min(LIMIT, max_tokens - 2))


def test_a_draft_ends_before_a_token_that_ends_the_request(make_request):
    drafting = Drafting([FixedProposer((1, 2, 3, 4))], LIMIT)
    learn_costs(drafting, 0.0)
    (request,) = start(make_request, drafting, stop_token_ids=[3])
    fill(drafting, [request])
    assert request.spec_token_ids == [1, 2]
    (request,) = start(make_request, drafting, stop_token_ids=[1])
    fill(drafting, [request])
    assert request.spec_token_ids == []


def test_some_requests_have_no_drafts(make_request):
    """Those that wait for the result of a draft, and unknown ones; they still have a row."""
    drafting = Drafting([FixedProposer()], LIMIT)
    learn_costs(drafting, 0.0)
    (waiting,) = start(make_request, drafting)
    waiting.num_output_placeholders = 2
    requests = [waiting, make_request([1, 2])]
    fill(drafting, requests)
    assert [request.spec_token_ids for request in requests] == [[], []]
    for request in requests:
        drafting.add_outputs(request, 1)
        drafting.record_verified(request, 1, 1)
        drafting.end_request(request)


@pytest.mark.parametrize(("token_ids", "expected"), [((1, 2, 3), [1, 2, 3]), ((1,), [])])
def test_the_first_token_of_a_draft_may_be_in_flight(make_request, token_ids, expected):
    """It is not computed, so a draft of one token is none; the rest is what is verified."""
    drafting = Drafting([FixedProposer(token_ids)], LIMIT)
    learn_costs(drafting, 0.4)
    (request,) = start(make_request, drafting)
    request.num_output_placeholders = 1
    fill(drafting, [request])
    assert request.spec_token_ids == expected
    if expected:
        for _ in range(60):
            request.spec_token_ids = []
            fill(drafting, [request])
            if request.spec_token_ids:
                drafting.record_verified(request, 2, 0)
        assert request.spec_token_ids == []
        request.num_output_placeholders = 0
        fill(drafting, [request])
        assert request.spec_token_ids == expected


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 100])
def test_the_longest_draft_behind_a_token_in_flight(make_request, max_tokens):
    drafting = Drafting([FixedProposer(range(20))], LIMIT)
    learn_costs(drafting, 0.0)
    (request,) = start(make_request, drafting, max_tokens=max_tokens)
    request.num_output_placeholders = 1
    fill(drafting, [request])
    num_verified = min(LIMIT, max_tokens - 3)  # one is known, one in flight, one behind the draft
    assert len(request.spec_token_ids) == (1 + num_verified if num_verified > 0 else 0)


class ForcedProposer(FixedProposer):
    """Says that nothing else is possible."""

    def propose(self, request, max_tokens) -> Draft | None:
        found = super().propose(request, max_tokens)
        return found and Draft(found.token_ids, found.acceptance_probs, self.name, is_forced=True)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ((1, 2, 3, 4), [1, 2, 3, 4]),  # goes on behind the forced tokens
        ((1, 9, 3, 4), [1, 2]),  # contradicts them
        ((5, 6, 7, 8), [1, 2]),
        ((1,), [1, 2]),
        ((), [1, 2]),
    ],
)
def test_a_draft_goes_on_behind_forced_tokens(make_request, token_ids, expected):
    proposers = [ForcedProposer((1, 2), 0.999, "grammar"), FixedProposer(token_ids, 0.9)]
    drafting = Drafting(proposers, LIMIT)
    learn_costs(drafting, 0.02)
    (request,) = start(make_request, drafting)
    fill(drafting, [request])
    assert request.spec_token_ids == expected


def test_proposers_learn_of_requests(make_request):
    proposer = FixedProposer()
    drafting = Drafting([proposer], LIMIT)
    (request,) = start(make_request, drafting)
    drafting.add_outputs(request, 2)
    drafting.add_outputs(request, 0)
    drafting.end_request(request)
    drafting.end_request(request)
    drafting.forget_outputs()
    seq_id = request.seq_id
    assert proposer.calls == [("begin", seq_id), ("outputs", seq_id, 2), ("end", seq_id),
                              ("forget",)]  # fmt: skip


def run(drafting, requests, probability, seconds_of, steps, seed=1):
    """Verify drafts that are right with this probability; return (tokens, seconds, drafts)."""
    generator = random.Random(seed)
    tokens, seconds, num_drafts = 0, 0.0, 0
    for _ in range(steps):
        for request in requests:
            request.spec_token_ids = []
        fill(drafting, requests)
        rows = len(requests)
        for request in requests:
            drafted = len(request.spec_token_ids)
            num_accepted = 0
            while num_accepted < drafted and generator.random() < probability:
                num_accepted += 1
            if drafted:
                drafting.record_verified(request, drafted, num_accepted)
            tokens += 1 + num_accepted
            rows += drafted
            num_drafts += drafted
        seconds += seconds_of(rows)
        drafting.learn_step(rows, seconds_of(rows))
    return tokens, seconds, num_drafts


@pytest.mark.parametrize("num_requests", [1, 16])
@pytest.mark.parametrize("probability", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("slope", [0.01, 0.1, 1.0])
def test_speculation_is_never_slower_by_two_percent(make_request, num_requests, probability, slope):
    """After a short time in which acceptance and costs are learnt, and much faster if it pays."""

    def seconds_of(rows: int) -> float:
        return 0.01 * (1 + slope * (rows - 1))

    drafting = Drafting([FixedProposer(range(LIMIT), 0.6)], LIMIT)
    requests = start(make_request, drafting, num_requests, max_tokens=10**6)
    run(drafting, requests, probability, seconds_of, 100)
    tokens, seconds, _ = run(drafting, requests, probability, seconds_of, 300)
    baseline = num_requests / seconds_of(num_requests)
    assert tokens / seconds >= 0.98 * baseline
    if probability == 1.0 and slope == 0.01:
        assert tokens / seconds >= 3 * baseline


def test_probes_are_rare_and_notice_a_change(make_request):
    drafting = Drafting([FixedProposer(range(LIMIT), 0.8)], LIMIT)
    requests = start(make_request, drafting, max_tokens=10**6)

    def seconds_of(rows: int) -> float:
        return 0.01 * (1 + 0.1 * (rows - 1))

    run(drafting, requests, 0.0, seconds_of, 400)
    _, seconds, num_drafts = run(drafting, requests, 0.0, seconds_of, 2000)
    assert 0 < num_drafts < 2000 * PROBE_SHARE / 0.1 * 1.5
    assert seconds <= 1.005 * 2000 * seconds_of(1)
    run(drafting, requests, 1.0, seconds_of, 1000)
    tokens, _, _ = run(drafting, requests, 1.0, seconds_of, 100)
    assert tokens >= 97 * (1 + LIMIT)
    assert PROBE_TOKENS < LIMIT


def test_a_full_batch_asks_no_proposer(make_request):
    drafting = Drafting([FixedProposer()], LIMIT)
    learn_costs(drafting, 1.0)
    requests = start(make_request, drafting, 64)
    fill(drafting, requests)
    assert not any(request.spec_token_ids for request in requests)


class FullProposer(FixedProposer):
    """Raises MemoryError in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__((9, 9, 9, 9), 0.99, "full")
        self.method = method

    def begin_request(self, request) -> bool:
        self._raise("begin_request")
        return super().begin_request(request)

    def add_outputs(self, request, num_new) -> None:
        self._raise("add_outputs")

    def propose(self, request, max_tokens) -> Draft | None:
        self._raise("propose")
        return super().propose(request, max_tokens)

    def end_request(self, request) -> None:
        super().end_request(request)
        self._raise("end_request")

    def _raise(self, method: str) -> None:
        if method == self.method:
            raise MemoryError


@pytest.mark.parametrize("method", ["begin_request", "add_outputs", "propose", "end_request"])
def test_without_memory_a_request_has_the_drafts_of_other_proposers(make_request, caplog, method):
    full, other = FullProposer(method), FixedProposer()
    drafting = Drafting([full, other], LIMIT)
    learn_costs(drafting, 0.02)
    (request,) = start(make_request, drafting)
    drafting.add_outputs(request, 1)
    fill(drafting, [request])
    assert request.spec_token_ids == ([9] * 4 if method == "end_request" else [1, 2, 3, 4])
    drafting.end_request(request)
    assert full.calls.count(("end", request.seq_id)) == 1
    assert "out of memory" in caplog.text


# From the configuration


class Grammars:
    """Forces tokens of one request."""

    def __init__(self) -> None:
        self.forced: dict[int, list[int]] = {}

    def has_grammar(self, request) -> bool:
        return request.seq_id in self.forced

    def forced_tokens(self, request) -> list[int]:
        return self.forced[request.seq_id]


@pytest.mark.interpreted
def test_a_configuration_with_several_methods(make_index, make_request, monkeypatch):
    monkeypatch.setattr(
        "engine_core.speculation.drafting.load_suffix_index", lambda: make_index, raising=True
    )
    grammars = Grammars()
    config = parse_speculative_config('{"method": "suffix+grammar"}', 16)
    drafting = make_drafting(config, grammars)
    learn_costs(drafting, 0.01)
    plain, bound = make_request([1, 2, 3, 1, 2]), make_request([1, 2, 3, 1, 2])
    grammars.forced[bound.seq_id] = [60, 61, 62, 63]
    for request in (plain, bound):
        drafting.add_request(request)
    fill(drafting, [plain, bound])
    assert plain.spec_token_ids == [3, 1, 2, 3]
    assert bound.spec_token_ids == [60, 61, 62, 63]
    bound.all_token_ids += [60, 61, 62, 63, 64]
    drafting.record_verified(bound, 4, 4)
    drafting.add_outputs(bound, 5)
    grammars.forced[bound.seq_id] = []
    bound.status = RequestStatus.FINISHED_STOPPED
    drafting.end_request(bound)
    later = make_request([60, 61])
    drafting.add_request(later)
    fill(drafting, [later])
    assert later.spec_token_ids == [62, 63, 64]
    drafting.forget_outputs()
    later.spec_token_ids = []
    fill(drafting, [later])
    assert later.spec_token_ids == []


def test_no_method_is_no_drafting():
    assert make_drafting(parse_speculative_config(None, 16), None) is None
    grammar = parse_speculative_config('{"method": "grammar"}', 16)
    assert make_drafting(grammar, None) is None
    assert make_drafting(grammar, Grammars()) is not None


@pytest.mark.interpreted
def test_without_the_compiled_index_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr("engine_core.speculation.drafting.load_suffix_index", lambda: None)
    config = parse_speculative_config('{"method": "suffix+ngram"}', 16)
    assert make_drafting(config, None) is None
    assert "suffix_index.c is not compiled" in caplog.text


def test_a_draft_model_of_the_workers_is_a_drafter(caplog):
    """Only one that they have loaded; the log names it beside the others."""
    config = parse_speculative_config('{"method": "grammar+eagle3", "model": "head"}', 16)
    with caplog.at_level("INFO"):
        drafting = make_drafting(config, Grammars(), "eagle3", 900)
    assert drafting.has_draft_model
    assert drafting.max_proposal_len == 900
    assert "drafts by grammar, eagle3, up to 16 tokens" in caplog.text
    assert not make_drafting(config, Grammars(), "").has_draft_model
    alone = parse_speculative_config('{"method": "draft_model", "model": "small"}', 16)
    assert make_drafting(alone, None, "") is None


@pytest.mark.interpreted
def test_a_model_without_drafts_is_named(caplog):
    """A method that was asked for, for a model that pools."""
    speculation = SpeculationConfig(speculative_config='{"method": "ngram"}')
    config = ServeConfig(speculation=speculation)
    worker = SimpleNamespace(is_batch_invariant=True)
    assert EngineCore._make_drafting(SimpleNamespace(), config, worker, None, pools=True) is None
    reason = "--speculative-config: no drafts for this model: its outputs are pooled"
    assert reason in caplog.text
