"""Proposals of a draft model, and how many are asked for, with a simulated worker."""

import random
from dataclasses import dataclass, field

import pytest

from engine_core.speculation.acceptance import ProposedTokens
from engine_core.speculation.draft_choice import StepCost
from engine_core.speculation.drafting import Drafting
from engine_core.speculation.proposer import Draft
from engine_core.speculation.worker_proposals import (
    PROBE_SHARE,
    LookaheadPlanner,
    ModelRequest,
    WorkerProposer,
)

LIMIT = 8


class SureProposer:
    """Is sure of its tokens, and always right."""

    name = "suffix"

    def begin_step(self) -> None: ...

    def begin_request(self, request) -> bool:
        return True

    def add_outputs(self, request, num_new) -> None: ...

    def propose(self, request, max_tokens) -> Draft | None:
        number = min(max_tokens, 6)
        return Draft([1] * number, [0.99 ** (index + 1) for index in range(number)], self.name)

    def end_request(self, request) -> None: ...

    def forget_outputs(self) -> None: ...


@dataclass
class Worker:
    """Steps and passes with costs by rows, in units of a step with one row.

    A token of a proposal is 1 with probability `acceptance`, else 2; every output is 1.
    slope: of a further row. pass_share: time of a pass as a share of that of a step. confidences:
    if given, each token has one of them, is right so often, and ends a proposal below
    min_acceptance_prob. num_present: tokens of a new request whose KV the model has.
    """

    acceptance: float
    slope: float = 0.1
    pass_share: float = 0.1
    confidences: tuple[float, ...] = ()
    min_acceptance_prob: float = 0.0
    prefills: bool = True
    num_present: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(4))
    computed: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    pass_seconds: float = 0.0
    num_tokens: int = 0
    num_proposed: int = 0
    num_prefills: int = 0

    def step_time(self, rows: int) -> float:
        return 0.01 * (1 + self.slope * (rows - 1))

    def play(self, drafting: Drafting, requests: list, steps: int, make=None) -> None:
        """Run steps; requests that end are replaced by `make()`."""
        for _ in range(steps):
            for request in requests:
                request.spec_token_ids = []
            limits = [request.max_tokens - request.num_output_tokens - 1 for request in requests]
            drafting.fill_drafts(requests, limits, 0)
            rows = len(requests) + sum(len(request.spec_token_ids) for request in requests)
            asked = self._ask(drafting, requests)
            self.seconds += self.step_time(rows)
            drafting.learn_step(rows, self.step_time(rows))
            for request in requests:
                self._verify(drafting, request)
            self._propose(drafting, asked)
            if make is not None:
                for index, request in enumerate(requests):
                    if request.num_output_tokens >= request.max_tokens:
                        drafting.end_request(request)
                        requests[index] = make()
                        drafting.add_request(requests[index])
                        drafting.note_draft_kv(requests[index], self.num_present)
                        self.computed[requests[index].seq_id] = self.num_present

    def _ask(self, drafting, requests):
        """Also advances the computed tokens, as the scheduler does when a step is planned."""
        asked = []
        if drafting.has_draft_model and drafting.may_propose(len(requests), 0):
            left = [
                (request, request.max_tokens - request.num_output_tokens - 2)
                for request in requests
            ]
            left = [(request, limit) for request, limit in left if limit > 0]
            for request, _ in left:
                request.num_computed_tokens = request.num_tokens - 1
            numbers, self.min_acceptance_prob = drafting.choose_proposals(
                [request for request, _ in left], [limit for _, limit in left], 0
            )
            asked = [
                (request, number)
                for (request, _), number in zip(left, numbers, strict=True)
                if number
            ]
        return asked

    def _verify(self, drafting, request) -> None:
        drafts = request.spec_token_ids
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == 1:
            num_accepted += 1
        request.all_token_ids += [1] * (num_accepted + 1)
        if drafts:
            drafting.record_verified(request, len(drafts), num_accepted)
        drafting.add_outputs(request, num_accepted + 1)
        self.num_tokens += num_accepted + 1

    def _propose(self, drafting, asked) -> None:
        if not asked:
            return
        proposals = [self._proposal(number) for _, number in asked]
        behind = 0
        for request, _ in asked:
            missing = request.num_tokens - self.computed.get(request.seq_id, 0)
            self.num_prefills += missing > 100
            behind += missing if self.prefills else 1
            self.computed[request.seq_id] = request.num_tokens
        rows = [behind]
        num_passes = [num_passes for _, _, num_passes in proposals]
        for position in range(1, max(num_passes)):
            rows.append(sum(number > position for number in num_passes))
        seconds = [self.pass_share * self.step_time(number) for number in rows]
        self.pass_seconds += sum(seconds)
        self.seconds += sum(seconds)
        drafting.learn_passes(rows, seconds)
        for (request, number), (draft, acceptance_probs, _) in zip(asked, proposals, strict=True):
            self.num_proposed += len(draft)
            drafting.keep_proposal(request, number, draft, acceptance_probs)

    def _proposal(self, most: int) -> tuple[list[int], list[float], int]:
        """Return a proposal, its acceptance probabilities and its passes."""
        if not self.confidences:
            draft = [1 if self.dice.random() < self.acceptance else 2 for _ in range(most)]
            return draft, [0.8 ** (index + 1) for index in range(most)], most
        draft, acceptance_probs, acceptance_prob = [], [], 1.0
        while len(draft) < most:
            confidence = self.dice.choice(self.confidences)
            acceptance_prob *= confidence
            if acceptance_prob < self.min_acceptance_prob:
                return draft, acceptance_probs, len(draft) + 1
            draft.append(1 if self.dice.random() < confidence else 2)
            acceptance_probs.append(acceptance_prob)
        return draft, acceptance_probs, most


def start(make_request, number=1, prompt=20, outputs=10**6, others=(), method="draft_model"):
    """Return (drafting, requests, a function that makes another request)."""

    def make():
        return make_request([7] * prompt, (5,), max_tokens=outputs)

    worker = WorkerProposer(method)
    drafting = Drafting([*others, worker], LIMIT, worker, LIMIT)
    requests = [make() for _ in range(number)]
    for request in requests:
        drafting.add_request(request)
    return drafting, requests, make


@pytest.mark.parametrize("num_requests", [1, 16])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("slope", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("pass_share", [0.03, 0.3, 2.0])
def test_a_draft_model_never_costs_two_percent(
    make_request, num_requests, acceptance, slope, pass_share
):
    """Requests of 300 tokens with 150 outputs come one after the other; some time is for learning.

    Where it is right and fast, it pays much.
    """
    drafting, requests, make = start(make_request, num_requests, 300, 150)
    worker = Worker(acceptance, slope, pass_share)
    worker.play(drafting, requests, 600, make)
    worker.seconds = worker.num_tokens = 0
    worker.play(drafting, requests, 900, make)
    baseline = num_requests / worker.step_time(num_requests)
    assert worker.num_tokens / worker.seconds >= 0.98 * baseline
    if acceptance == 1.0 and pass_share == 0.03 and slope == 0.02:
        assert worker.num_tokens / worker.seconds >= (3 if num_requests == 1 else 1.5) * baseline


@pytest.mark.parametrize(
    ("confidences", "least"), [((0.95, 0.95, 0.3), 1.9), ((0.95, 0.3), 1.5), ((0.3,), 0.99)]
)
def test_proposals_that_end_early_pay_for_what_they_have(make_request, confidences, least):
    """A token that is too unlikely is no rejected one: it costs a pass, and no row."""
    drafting, requests, make = start(make_request, 1, 300, 150)
    worker = Worker(0.0, 0.1, 0.03, confidences=confidences)
    worker.play(drafting, requests, 600, make)
    worker.seconds = worker.num_tokens = 0
    worker.play(drafting, requests, 900, make)
    assert worker.num_tokens / worker.seconds >= least / worker.step_time(1)


def test_a_token_that_was_not_proposed_was_not_tried():
    tokens = ProposedTokens(4)
    for _ in range(200):
        tokens.record([0.9, 0.81], 2)
    assert tokens.acceptance_probs[1] == pytest.approx(0.81, abs=0.02)
    assert tokens.shares[1] == pytest.approx(1.0)
    for _ in range(200):
        tokens.record([0.9], 4)
    assert tokens.acceptance_probs[0] == pytest.approx(0.9, abs=0.02)
    assert tokens.acceptance_probs[1] < 0.1, (
        "a proposal of two tokens brings no more than one of one"
    )
    assert tokens.shares[0] == pytest.approx(1.0)
    assert tokens.shares[1] < 0.1, "and costs no more"


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_what_was_spent_before_anything_is_known_is_little(make_request, acceptance):
    """A useless model costs 4 % of the first 300 steps, a prefill of 500 tokens included."""
    drafting, requests, _ = start(make_request, 4, 500)
    worker = Worker(acceptance, slope=0.01)
    worker.play(drafting, requests, 300)
    if acceptance == 0.0:
        assert worker.num_tokens / worker.seconds >= 0.96 * 4 / worker.step_time(4)
        assert worker.num_prefills <= 2, "one request was tried"
    else:
        assert worker.num_prefills == 4


def test_probes_are_rare_and_notice_a_change(make_request):
    drafting, requests, make = start(make_request, 1, 20, 100)
    worker = Worker(0.0)
    worker.play(drafting, requests, 1000, make)
    before = worker.pass_seconds
    worker.play(drafting, requests, 4000, make)
    spent = worker.pass_seconds - before
    assert 0 < spent <= 1.2 * PROBE_SHARE * 4000 * 0.01
    worker.acceptance = 1.0
    worker.play(drafting, requests, 8000, make)
    before = worker.num_tokens
    worker.play(drafting, requests, 100, make)
    assert worker.num_tokens - before > 500


def test_a_probe_is_verified_when_its_proposal_has_come(make_request):
    """With steps planned ahead, that is a step later."""
    drafting, requests, _ = start(make_request)
    worker = Worker(0.0, slope=0.5)
    worker.play(drafting, requests, 300)
    request = requests[0]
    drafting._planner._probe_budget = 1000.0
    assert drafting.may_propose(1, 0)
    assert drafting.choose_proposals(requests, [100], 0)[0] == [4]
    for _ in range(2):
        request.spec_token_ids = []
        drafting.fill_drafts(requests, [100], 0)
        assert request.spec_token_ids == []
    drafting.keep_proposal(request, 4, [1, 1, 1, 1], [0.1, 0.01, 0.001, 0.0001])
    drafting.fill_drafts(requests, [100], 0)
    assert request.spec_token_ids == [1, 1, 1, 1]
    request.spec_token_ids = []
    drafting.fill_drafts(requests, [100], 0)
    assert request.spec_token_ids == []


def test_where_another_proposer_brings_as_much_the_model_is_not_asked(make_request):
    drafting, requests, _ = start(make_request, others=[SureProposer()])
    worker = Worker(0.7, slope=0.02)
    worker.play(drafting, requests, 100)
    before = worker.num_proposed
    worker.play(drafting, requests, 500)
    assert worker.num_proposed - before < 40


def test_a_long_context_is_prefilled_only_where_that_pays(make_request):
    """Requests with few outputs do not repay it; those with many do."""
    shares = []
    for outputs in (6, 400):
        drafting, requests, make = start(make_request, 1, 3000, outputs)
        worker = Worker(0.7, slope=0.02)
        worker.play(drafting, requests, 1200, make)
        num_prefills = worker.num_prefills
        tokens = worker.num_tokens
        worker.play(drafting, requests, 1200, make)
        num_requests = (worker.num_tokens - tokens) / outputs
        shares.append((worker.num_prefills - num_prefills) / num_requests)
    assert shares[0] < 0.1
    assert shares[1] > 0.8


def test_heads_have_their_kv_without_a_prefill(make_request):
    drafting, requests, make = start(make_request, 2, 5000, 6, method="eagle")
    worker = Worker(0.7, slope=0.02, prefills=False)
    worker.play(drafting, requests, 100, make)
    assert worker.num_proposed > 100


def test_a_preempted_request_is_prefilled_again(make_request):
    drafting, requests, _ = start(make_request, 1, 200)
    worker = Worker(1.0)
    worker.play(drafting, requests, 20)
    assert worker.num_prefills == 1
    worker.computed.clear()
    drafting.note_draft_kv(requests[0], 0)
    worker.play(drafting, requests, 60)
    assert worker.num_prefills == 2


@pytest.mark.parametrize(("num_present", "most"), [(0, 30), (2990, 10**6)])
def test_kv_that_is_there_is_not_charged(make_request, num_present, most):
    """Short answers do not repay a prefill of 3,000 tokens; behind a prefix hit they need none."""
    drafting, requests, make = start(make_request, 1, 3000, 6)
    worker = Worker(0.9, slope=0.02, num_present=num_present)
    worker.play(drafting, requests, 1200, make)
    before = worker.num_proposed
    worker.play(drafting, requests, 600, make)
    assert worker.num_proposed - before < most
    if num_present:
        assert worker.num_proposed - before > 500


def test_a_full_batch_asks_nothing(make_request):
    drafting, _, _ = start(make_request, 64)
    for _ in range(20):
        for rows in (1, 4, 16, 64, 128):
            drafting.learn_step(rows, 0.01 * rows)
    assert not drafting.may_propose(64, 0)


def test_verified_tokens_are_counted_by_drafter(make_request):
    drafting, requests, _ = start(make_request, others=[SureProposer()])
    worker = Worker(0.5)
    worker.play(drafting, requests, 50)
    counts = drafting.pop_source_counts()
    assert counts["suffix"][0] == counts["suffix"][1] > 50
    assert drafting.pop_source_counts() == {}


# A proposal


@pytest.mark.parametrize(
    ("new", "left"),
    [([3], [4, 5]), ([3, 4], [5]), ([3, 4, 5], []), ([3, 4, 5, 6], []), ([9], []), ([3, 9], [])],
)
def test_known_tokens_shorten_a_proposal_or_contradict_it(make_request, new, left):
    proposer, request = WorkerProposer("eagle"), make_request([1, 2])
    proposer.keep_proposal(request, [3, 4, 5], [0.8, 0.8, 0.4])
    request.all_token_ids += new
    proposer.add_outputs(request, len(new))
    draft = proposer.propose(request, 8)
    assert (draft.token_ids if draft else []) == left
    if new == [3, 4]:
        assert draft.acceptance_probs == [0.5]


def test_a_proposal_is_replaced_by_the_next_one(make_request):
    proposer, request = WorkerProposer("eagle"), make_request([1, 2])
    proposer.keep_proposal(request, [3, 4], [0.5, 0.9])
    draft = proposer.propose(request, 1)
    assert (draft.token_ids, draft.acceptance_probs, draft.source) == ([3], [0.5], "eagle")
    proposer.keep_proposal(request, [], [])
    assert proposer.propose(request, 1) is None
    proposer.end_request(request)


def test_proposals_end_where_a_token_is_not_worth_its_time(make_request):
    cost = StepCost()
    planner = LookaheadPlanner(LIMIT, cost, prefills=False)
    for _ in range(20):
        for rows in (1, 2, 4, 8, 16):
            cost.learn_step(rows, 0.01 * (1 + 0.2 * (rows - 1)))
        planner.learn_passes([1], [0.001])
    request = make_request([1, 2, 3], (4,))
    assert planner.may_pay(1, 0)
    assert planner.choose_lengths([ModelRequest()], [request], [100], 0)[0] > 0
    assert 0.25 < planner.min_acceptance_prob < 0.5
