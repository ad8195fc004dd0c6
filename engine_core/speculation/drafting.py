"""Drafting: which requests get drafts in a step, from which proposer, and how long.

    add_request ─▶ every proposer learns the prompt
    fill_drafts ─▶ each request: the draft with the most expected tokens
                   whole step:   the lengths with the most tokens per time ─▶ spec_token_ids
    after a plan  choose_proposals ─▶ how many tokens the workers' draft model proposes after it
    result      ─▶ record_verified (acceptance), add_outputs, learn_step (time by rows),
                   keep_proposal: a draft that competes with the others

Where a draft does not pay, because the step is large or acceptance low, none is made. A share of
the time then goes to short drafts all the same, so that a change is noticed. Where drafts pay, one
step in a hundred goes without, because only the comparison says that they do.
"""

import logging
from collections.abc import Sequence
from typing import Final

from engine_core.request import Request
from engine_core.speculation.acceptance import AcceptanceTable
from engine_core.speculation.draft_choice import StepCost, choose_lengths, needed_acceptance_prob
from engine_core.speculation.grammar import ForcedTokenSource, GrammarProposer
from engine_core.speculation.lookup import IndexMemory, NgramProposer, SuffixProposer
from engine_core.speculation.outside import DraftProposer
from engine_core.speculation.proposer import Draft, Proposer, expected_tokens
from engine_core.speculation.suffix_index import load_suffix_index
from engine_core.speculation.worker_proposals import (
    MAX_MIN_ACCEPTANCE,
    PROBE_SHARE,
    PROBE_TOKENS,
    LookaheadPlanner,
    ModelRequest,
    WorkerProposer,
)
from proto.runtime.plugins import load_part
from proto.settings.speculative_config import FIELD, HEAD_METHODS, METHODS, SpeculativeConfig

logger = logging.getLogger("tokend.speculation")

_NO_LIMIT: Final = 1 << 62
_AFTER_FORCED: Final = 64
_AFTER_IN_FLIGHT: Final = 128
"""Added to the keys of drafts that begin with forced tokens, or after a token in flight, so that
their acceptance is learnt apart; more than any key."""


class DraftedRequest:
    """What is kept of a request: the proposers that may draft for it, and its last draft.

    model: what the planner of proposals keeps; unused without a draft model.
    """

    __slots__ = ("draft", "model", "proposers")

    def __init__(self, proposers: list[Proposer]) -> None:
        self.proposers = proposers
        self.draft: Draft | None = None
        self.model: Final = ModelRequest()

    def drop_proposer(self, proposer: Proposer) -> None:
        self.proposers = [other for other in self.proposers if other is not proposer]


class DraftCounts:
    """Tokens of one drafter that steps verified, and those of them that were accepted."""

    __slots__ = ("num_accepted", "num_tried")

    def __init__(self) -> None:
        self.num_tried = self.num_accepted = 0


class CandidateDraft:
    """A draft, with the acceptance probabilities that its proposer's acceptance so far makes
    likely.

    known    x a b c |                 c: the last known token
    draft            | d e f           all of it is verified after c
    in flight        | ? |             the token that a step in flight samples after c
    draft            | d | e f         d stands for it; e and f are verified after it

    draft: what is verified. in_flight: [0 or 1], the token before it, which is in flight.
    """

    __slots__ = ("acceptance_probs", "draft", "in_flight")

    def __init__(self, draft: Draft, acceptance_probs: list[float], in_flight: list[int]) -> None:
        self.draft: Final = draft
        self.acceptance_probs: Final = acceptance_probs
        self.in_flight: Final = in_flight


class Drafting:
    """The `DraftProvider` of the daemon: owns the proposers, and decides each step what is drafted.

    `scheduler/features/speculative_decoding.py` describes the methods that the scheduler calls;
    docstrings here add what is particular to this class.

    proposers: those that force tokens come first. max_tokens: of one draft. worker: one of the
    proposers, whose drafts come from a model in the workers. max_proposed: tokens of such a draft.
    max_proposal_len: tokens of a sequence beyond which the model proposes nothing.
    has_draft_model: whether there is such a model.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        max_tokens: int,
        worker: WorkerProposer | None = None,
        max_proposed: int = 0,
        max_proposal_len: int = _NO_LIMIT,
    ) -> None:
        self._proposers = list(proposers)
        self._max_tokens = max_tokens
        self._requests: dict[int, DraftedRequest] = {}  # by seq_id
        self._acceptance = AcceptanceTable()
        self._cost = StepCost()
        self._probe_budget = 0.0  # time, in steps with one row
        self._turn = 0
        self._counts: dict[str, DraftCounts] = {}
        self._worker = worker
        self.has_draft_model = worker is not None
        self.max_proposal_len = max_proposal_len
        self._planner: LookaheadPlanner | None = None
        if worker is not None:
            self._planner = LookaheadPlanner(
                max_proposed or max_tokens, self._cost, prefills=worker.name not in HEAD_METHODS
            )

    @property
    def description(self) -> str:
        """The methods and the longest draft, for the operator."""
        names = ", ".join(proposer.name for proposer in self._proposers)
        return f"{names}, up to {self._max_tokens} tokens a step"

    def add_request(self, request: Request) -> None:
        proposers: list[Proposer] = []
        for proposer in self._proposers:
            try:
                if proposer.begin_request(request):
                    proposers.append(proposer)
            except MemoryError:
                _end_drafts(proposer, request)
        self._requests[request.seq_id] = DraftedRequest(proposers)

    def begin_step(self) -> None:
        for proposer in self._proposers:
            proposer.begin_step()

    def add_outputs(self, request: Request, num_new: int) -> None:
        drafted = self._requests.get(request.seq_id)
        if drafted is not None and num_new:
            for proposer in drafted.proposers:
                try:
                    proposer.add_outputs(request, num_new)
                except MemoryError:
                    drafted.drop_proposer(proposer)
                    _end_drafts(proposer, request)

    def end_request(self, request: Request) -> None:
        """End its drafts. If it has finished, drafts of its tenant may repeat its outputs."""
        drafted = self._requests.pop(request.seq_id, None)
        if drafted is not None:
            for proposer in drafted.proposers:
                try:
                    proposer.end_request(request)
                except MemoryError:
                    logger.warning("out of memory: %s does not keep the outputs", proposer.name)
            if self._planner is not None:
                self._planner.end_request(drafted.model, request)

    def forget_outputs(self) -> None:
        for proposer in self._proposers:
            proposer.forget_outputs()

    def fill_drafts(
        self, requests: Sequence[Request], limits: Sequence[int], num_other_tokens: int
    ) -> None:
        """Choose drafts whose lengths bring the most tokens per time, and now and then a probe.

        If a step of a request is in flight, the draft begins with the token expected of that step,
        which has a row already.
        """
        num_requests = len(requests)
        if num_requests == 0:
            return
        num_drafted = 0
        max_drafts = self._max_tokens * num_requests
        candidates: list[CandidateDraft | None] | None = None
        if needed_acceptance_prob(num_requests, num_other_tokens, max_drafts, self._cost) <= 1.0:
            candidates = [
                self._best_draft(request, limit)
                for request, limit in zip(requests, limits, strict=True)
            ]
            probs = [[] if each is None else each.acceptance_probs for each in candidates]
            lengths = choose_lengths(probs, num_requests, num_other_tokens, self._cost)
            num_drafted = sum(lengths)
            if num_drafted and not num_other_tokens and self._cost.is_stale(num_requests):
                return
            for request, candidate, length in zip(requests, candidates, lengths, strict=True):
                if candidate is not None and length:
                    self._set_draft(request, candidate, length)
        self._probe(requests, limits, candidates, num_requests + num_other_tokens + num_drafted)
        if self._planner is not None and self._planner.probe is not None:
            self._verify_probe(self._planner.probe, requests, limits)

    def record_verified(self, request: Request, num_tried: int, num_accepted: int) -> None:
        drafted = self._requests.get(request.seq_id)
        if drafted is not None and drafted.draft is not None:
            self._acceptance.record(drafted.draft, num_tried, num_accepted)
            source = drafted.draft.source
            counts = self._counts.get(source)
            if counts is None:
                counts = self._counts[source] = DraftCounts()
            counts.num_tried += num_tried
            counts.num_accepted += num_accepted
            planner, worker = self._planner, self._worker
            if planner is not None and worker is not None and source == worker.name:
                planner.learn_verified(num_tried, num_accepted)
            drafted.draft = None

    def pop_source_counts(self) -> dict[str, tuple[int, int]]:
        counts = {
            name: (source.num_tried, source.num_accepted) for name, source in self._counts.items()
        }
        self._counts = {}
        return counts

    # Proposals of a model in the workers

    def may_propose(self, num_requests: int, num_other_tokens: int) -> bool:
        planner = self._planner
        return planner is not None and planner.may_pay(num_requests, num_other_tokens)

    def choose_proposals(
        self, requests: Sequence[Request], limits: Sequence[int], num_other_tokens: int
    ) -> tuple[list[int], float]:
        planner, worker = self._planner, self._worker
        assert planner is not None
        assert worker is not None
        states = [self._requests[request.seq_id].model for request in requests]
        lengths = planner.choose_lengths(states, requests, limits, num_other_tokens)
        ratio = self._acceptance.first_token_ratio(worker.name)
        return lengths, min(MAX_MIN_ACCEPTANCE, planner.min_acceptance_prob / ratio)

    def keep_proposal(
        self,
        request: Request,
        num_asked: int,
        token_ids: list[int],
        acceptance_probs: Sequence[float],
    ) -> None:
        """Make it a draft of the worker's proposer, which competes with the other drafts."""
        drafted = self._requests.get(request.seq_id)
        if drafted is None or self._worker is None or self._planner is None:
            return
        self._worker.keep_proposal(request, token_ids, acceptance_probs)
        draft = self._worker.propose(request, len(token_ids))
        corrected = [] if draft is None else self._acceptance.acceptance_probs(draft)
        self._planner.learn_proposal(drafted.model, request.num_tokens, num_asked, corrected)

    def note_draft_kv(self, request: Request, num_tokens: int) -> None:
        drafted = self._requests.get(request.seq_id)
        if drafted is not None:
            drafted.model.num_computed = num_tokens

    def learn_passes(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        if self._planner is not None:
            self._planner.learn_passes(rows, seconds)

    def learn_step(self, num_rows: int, seconds: float) -> None:
        self._cost.learn_step(num_rows, seconds)

    # Parts of a decision

    def _best_draft(self, request: Request, limit: int) -> CandidateDraft | None:
        """Return the draft with the most expected tokens, cut to what the request has use for.

        It ends before a token that ends the request: that one is drawn anyway. If a grammar forces
        tokens, another proposer's draft counts only if it begins with them.
        """
        drafted = self._requests.get(request.seq_id)
        num_in_flight = request.num_output_placeholders
        if drafted is None or num_in_flight > 1 or limit <= 0:
            return None
        room = min(limit, self._max_tokens) + num_in_flight
        other_expected = 0.0  # of the drafts that come from the engine
        best: CandidateDraft | None = None
        best_total = 0.0
        forced: Draft | None = None
        for proposer in drafted.proposers:
            try:
                draft = proposer.propose(request, room)
            except MemoryError:
                drafted.drop_proposer(proposer)
                _end_drafts(proposer, request)
                continue
            if draft is not None and draft.is_forced:
                forced = draft
            elif draft is not None and forced is not None:
                draft = _after_forced(draft, forced)
            if draft is not None:
                draft = _before_stop(draft, request)
            if draft is None:
                continue
            in_flight = draft.token_ids[:num_in_flight]
            if num_in_flight:
                if len(draft.token_ids) == 1:
                    continue
                draft = _after_in_flight(draft)
            acceptance_probs = self._acceptance.acceptance_probs(draft)
            expected = expected_tokens(acceptance_probs)
            if proposer is not self._worker:
                other_expected = max(other_expected, expected)
            if expected > best_total:
                best, best_total = CandidateDraft(draft, acceptance_probs, in_flight), expected
        if self._worker is not None:
            drafted.model.note_other_draft(other_expected)
        return best

    def _set_draft(self, request: Request, candidate: CandidateDraft, length: int) -> None:
        self._requests[request.seq_id].draft = candidate.draft
        request.spec_token_ids = candidate.in_flight + candidate.draft.token_ids[:length]

    def _probe(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        candidates: Sequence[CandidateDraft | None] | None,
        num_rows: int,
    ) -> None:
        """Draft for one request that has no draft, if the time for it was saved up.

        candidates: the best drafts of the requests; None if they were not asked for. num_rows: of
        the step so far. Requests take turns.
        """
        before = self._cost.cost(num_rows)
        if self._probe_budget < self._cost.cost(num_rows + PROBE_TOKENS) - before:
            self._probe_budget += PROBE_SHARE * before
            return
        self._turn += 1
        index = self._turn % len(requests)
        request = requests[index]
        if request.spec_token_ids:
            return
        if candidates is None:
            candidate = self._best_draft(request, limits[index])
        else:
            candidate = candidates[index]
        if candidate is None:
            return
        length = min(PROBE_TOKENS, len(candidate.draft.token_ids))
        self._probe_budget -= self._cost.cost(num_rows + length) - before
        self._set_draft(request, candidate, length)

    def _verify_probe(
        self, probe: ModelRequest, requests: Sequence[Request], limits: Sequence[int]
    ) -> None:
        """Verify a proposal, once it is there, that was only asked for to learn what it brings."""
        assert self._worker is not None
        assert self._planner is not None
        for request, limit in zip(requests, limits, strict=True):
            drafted = self._requests.get(request.seq_id)
            if drafted is None or drafted.model is not probe or request.spec_token_ids:
                continue
            if limit <= 0:
                return
            num_in_flight = request.num_output_placeholders
            draft = self._worker.propose(request, min(limit, PROBE_TOKENS) + num_in_flight)
            if draft is None or num_in_flight > 1:
                return
            self._planner.probe = None
            draft = _before_stop(draft, request)
            if draft is None or len(draft.token_ids) <= num_in_flight:
                return
            in_flight = draft.token_ids[:num_in_flight]
            if num_in_flight:
                draft = _after_in_flight(draft)
            self._set_draft(
                request,
                CandidateDraft(draft, draft.acceptance_probs, in_flight),
                len(draft.token_ids),
            )


def _end_drafts(proposer: Proposer, request: Request) -> None:
    """End the drafts of a proposer for a request, after a MemoryError."""
    logger.warning("out of memory: no more drafts by %s for a request", proposer.name)
    proposer.end_request(request)


def _after_forced(draft: Draft, forced: Draft) -> Draft | None:
    """Return a draft that begins with the forced tokens, with their acceptance probability; None
    for others."""
    num_forced = len(forced.token_ids)
    if len(draft.token_ids) <= num_forced or draft.token_ids[:num_forced] != forced.token_ids:
        return None
    if draft.acceptance_probs[num_forced - 1] <= 0.0:
        return None
    ratio = forced.acceptance_probs[-1] / draft.acceptance_probs[num_forced - 1]
    acceptance_probs = forced.acceptance_probs + [
        ratio * value for value in draft.acceptance_probs[num_forced:]
    ]
    return Draft(draft.token_ids, acceptance_probs, draft.source, draft.key + _AFTER_FORCED)


def _after_in_flight(draft: Draft) -> Draft:
    """Return a draft without its first token; the acceptance probabilities include that of this
    token."""
    return Draft(
        draft.token_ids[1:], draft.acceptance_probs[1:], draft.source, draft.key + _AFTER_IN_FLIGHT
    )


def _before_stop(draft: Draft, request: Request) -> Draft | None:
    """Return the part of a draft before the first token that ends the request."""
    stop_ids = request.stop_ids
    if not stop_ids:
        return draft
    for index, token_id in enumerate(draft.token_ids):
        if token_id in stop_ids:
            if index == 0:
                return None
            return Draft(
                draft.token_ids[:index], draft.acceptance_probs[:index], draft.source, draft.key
            )
    return draft


def make_drafting(
    config: SpeculativeConfig,
    grammars: ForcedTokenSource | None,
    draft_method: str = "",
    max_draft_len: int = _NO_LIMIT,
) -> Drafting | None:
    """Return the drafting of a configuration; None if it has no method, or none can be used.

    grammars: of the engine; None for a model whose outputs have no grammars. draft_method: of the
    draft model in the workers; "" for none. max_draft_len: tokens of a sequence beyond which that
    model proposes nothing. Without its compiled library `ngram` and `suffix` draft nothing, and a
    warning says so.
    """
    proposers: list[Proposer] = []
    if "grammar" in config.methods and grammars is not None:
        proposers.append(GrammarProposer(grammars))
    make_index = load_suffix_index()
    memory = IndexMemory()
    if make_index is not None:
        if "suffix" in config.methods:
            proposers.append(
                SuffixProposer(
                    make_index,
                    depth=config.suffix_decoding_max_tree_depth,
                    max_tokens=config.num_speculative_tokens,
                    factor=config.suffix_decoding_max_spec_factor,
                    min_probability=config.suffix_decoding_min_token_prob,
                    max_requests=config.suffix_decoding_max_cached_requests,
                    memory=memory,
                )
            )
        if "ngram" in config.methods:
            proposers.append(
                NgramProposer(
                    make_index,
                    config.prompt_lookup_min,
                    config.prompt_lookup_max,
                    config.num_speculative_tokens,
                    memory,
                )
            )
    elif not set(config.methods).isdisjoint(("suffix", "ngram")):
        logger.warning(
            "no drafts by suffix or ngram: engine_core/csrc/suffix_index.c is not compiled "
            "(python -m engine_core.build_native)"
        )
    proposers += [
        load_part("draft_proposer", name, FIELD, DraftProposer)(name, config.num_speculative_tokens)
        for name in config.methods
        if name not in METHODS
    ]
    worker = WorkerProposer(draft_method) if draft_method else None
    if worker is not None:
        proposers.append(worker)
    if not proposers:
        return None
    drafting = Drafting(
        proposers,
        config.max_tokens,
        worker,
        config.num_speculative_tokens,
        max_draft_len,
    )
    logger.info("drafts by %s", drafting.description)
    return drafting
