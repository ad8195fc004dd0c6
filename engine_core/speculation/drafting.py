"""Drafting: which requests get drafts in a step, from which proposer, and how long.

    add_request ─▶ every proposer learns the prompt
    fill_drafts ─▶ each request: the draft with the most expected tokens
                   whole step:   the lengths with the most tokens per time ─▶ spec_token_ids
    result      ─▶ record_verified (acceptance), add_outputs, learn_step (time by rows)

Where a draft does not pay, because the step is large or acceptance low, none is made. A share of
the time then goes to short drafts all the same, so that a change is noticed. Where drafts pay, one
step in a hundred goes without, because only the comparison says that they do.
"""

import logging
from collections.abc import Sequence
from typing import Final

from engine_core.request import Request
from engine_core.speculation.draft_choice import (
    AcceptanceTable,
    StepCost,
    choose_lengths,
    needed_survival,
)
from engine_core.speculation.grammar import ForcedTokenSource, GrammarProposer
from engine_core.speculation.lookup import NgramProposer, SuffixProposer
from engine_core.speculation.proposer import Draft, Proposer, expected_tokens
from engine_core.speculation.suffix_index import load_suffix_index
from proto.speculative_config import SpeculativeConfig

logger = logging.getLogger("tokend.speculation")

PROBE_SHARE: Final = 0.004
"""Share of the time that drafts may take which are not expected to pay."""
PROBE_TOKENS: Final = 4
"""Longest draft of this kind."""
_BEHIND_FORCED: Final = 64
_BEHIND_IN_FLIGHT: Final = 128
"""Added to the keys of drafts that begin with forced tokens, or behind a token in flight, so that
their acceptance is learnt apart; more than any key."""


class DraftedRequest:
    """What is kept of a request: the proposers that may draft for it, and its last draft."""

    __slots__ = ("draft", "proposers")

    def __init__(self, proposers: list[Proposer]) -> None:
        self.proposers: Final = proposers
        self.draft: Draft | None = None


class Guess:
    """A draft, with the survivals that its proposer's acceptance so far makes likely.

    known    x a b c |                 c: the last known token
    draft            | d e f           all of it is verified behind c
    in flight        | ? |             the token that a step in flight samples behind c
    draft            | d | e f         the guess is that it is d; e and f are verified behind it

    draft: what is verified. in_flight: [0 or 1], the guess at the token in flight before it.
    """

    __slots__ = ("draft", "in_flight", "survival")

    def __init__(self, draft: Draft, survival: list[float], in_flight: list[int]) -> None:
        self.draft: Final = draft
        self.survival: Final = survival
        self.in_flight: Final = in_flight


class Drafting:
    """Owns the proposers, and decides each step what is drafted.

    The scheduler calls it for requests that may be drafted for, and clears drafts after each plan.

    proposers: those that force tokens come first. max_tokens: of one draft. max_model_len: of
    prompt and output.
    """

    def __init__(self, proposers: Sequence[Proposer], max_tokens: int, max_model_len: int) -> None:
        self._proposers = list(proposers)
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._requests: dict[int, DraftedRequest] = {}  # by seq_id
        self._acceptance = AcceptanceTable()
        self._cost = StepCost()
        self._credit = 0.0  # time for probes, in steps with one row
        self._turn = 0

    def add_request(self, request: Request) -> None:
        """Begin to draft for a request; `end_request` ends it."""
        proposers = [one for one in self._proposers if one.begin_request(request)]
        self._requests[request.seq_id] = DraftedRequest(proposers)

    def add_outputs(self, request: Request, num_new: int) -> None:
        """Learn the last `num_new` tokens of `request.all_token_ids`, which are verified."""
        drafted = self._requests.get(request.seq_id)
        if drafted is not None and num_new:
            for proposer in drafted.proposers:
                proposer.add_outputs(request, num_new)

    def end_request(self, request: Request) -> None:
        """Forget a request. If it has finished, drafts of its tenant may repeat its outputs."""
        drafted = self._requests.pop(request.seq_id, None)
        if drafted is not None:
            for proposer in drafted.proposers:
                proposer.end_request(request)

    def forget_outputs(self) -> None:
        """Forget the outputs of ended requests, as when the prefix cache is reset."""
        for proposer in self._proposers:
            proposer.forget_outputs()

    def fill_drafts(self, requests: Sequence[Request], num_other_tokens: int) -> None:
        """Set `spec_token_ids` of the requests that decode in the next step.

        requests: they have one row each, besides drafts. A request that has a draft, by a worker,
        keeps it. If a step of a request is in flight, its draft begins with a guess at the token of
        that step, which has a row already. num_other_tokens: further rows of the step, of prompts.
        """
        num_requests = len(requests)
        if num_requests == 0:
            return
        num_drafted = 0
        for request in requests:
            if request.spec_token_ids:
                num_other_tokens += len(request.spec_token_ids)
        max_drafts = self._max_tokens * num_requests
        if needed_survival(num_requests, num_other_tokens, max_drafts, self._cost) <= 1.0:
            owners: list[Request] = []
            guesses: list[Guess] = []
            for request in requests:
                guess = self._best_guess(request)
                if guess is not None:
                    owners.append(request)
                    guesses.append(guess)
            if guesses:
                survivals = [guess.survival for guess in guesses]
                lengths = choose_lengths(survivals, num_requests, num_other_tokens, self._cost)
                num_drafted = sum(lengths)
                if num_drafted and not num_other_tokens and self._cost.is_stale(num_requests):
                    return
                for request, guess, length in zip(owners, guesses, lengths, strict=True):
                    if length:
                        self._set_draft(request, guess, length)
        self._probe(requests, num_requests + num_other_tokens + num_drafted)

    def record_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn how much of a request's last draft was accepted, of the tokens that were verified.

        Call it before the next `fill_drafts`; not at all for a draft that was dropped.
        """
        drafted = self._requests.get(request.seq_id)
        if drafted is not None and drafted.draft is not None:
            self._acceptance.record(drafted.draft, num_drafted, num_accepted)
            drafted.draft = None

    def learn_step(self, num_rows: int, seconds: float) -> None:
        """Learn the duration of a step. num_rows: all of its tokens, drafts included."""
        self._cost.learn_step(num_rows, seconds)

    def _best_guess(self, request: Request) -> Guess | None:
        """Return the draft with the most expected tokens, cut to what the request may still have.

        A step brings a token more than it has drafts, so the draft ends before the last one that
        fits. It also ends before a token that ends the request: that one is drawn anyway. Of a
        proposer behind one that forces tokens, only what goes on from those counts.
        """
        drafted = self._requests.get(request.seq_id)
        num_in_flight = request.num_output_placeholders
        if drafted is None or num_in_flight > 1 or request.spec_token_ids:
            return None
        num_tokens = len(request.all_token_ids)
        room = request.num_prompt_tokens + request.max_tokens - num_tokens - 1
        room = min(room, self._max_model_len - num_tokens - 1)
        room = min(room, self._max_tokens + num_in_flight)
        if room <= num_in_flight:
            return None
        best: Guess | None = None
        best_total = 0.0
        forced: Draft | None = None
        for proposer in drafted.proposers:
            draft = proposer.propose(request, room)
            if draft is not None and draft.is_forced:
                forced = draft
            elif draft is not None and forced is not None:
                draft = _behind_forced(draft, forced)
            if draft is not None:
                draft = _before_stop(draft, request)
            if draft is None:
                continue
            in_flight = draft.token_ids[:num_in_flight]
            if num_in_flight:
                if len(draft.token_ids) == 1:
                    continue
                draft = _behind_in_flight(draft)
            survival = self._acceptance.survival(draft)
            expected = expected_tokens(survival)
            if expected > best_total:
                best, best_total = Guess(draft, survival, in_flight), expected
        return best

    def _set_draft(self, request: Request, guess: Guess, length: int) -> None:
        self._requests[request.seq_id].draft = guess.draft
        request.spec_token_ids = guess.in_flight + guess.draft.token_ids[:length]

    def _probe(self, requests: Sequence[Request], num_rows: int) -> None:
        """Draft for one request that has no draft, if the time for it was saved up.

        num_rows: of the step so far. Requests take turns.
        """
        before = self._cost.cost(num_rows)
        if self._credit < self._cost.cost(num_rows + PROBE_TOKENS) - before:
            self._credit += PROBE_SHARE * before
            return
        self._turn += 1
        request = requests[self._turn % len(requests)]
        guess = self._best_guess(request)
        if guess is None:
            return
        length = min(PROBE_TOKENS, len(guess.draft.token_ids))
        self._credit -= self._cost.cost(num_rows + length) - before
        self._set_draft(request, guess, length)


def _behind_forced(draft: Draft, forced: Draft) -> Draft | None:
    """Return a draft that begins with the forced tokens, with their survival; None for others."""
    num_forced = len(forced.token_ids)
    if len(draft.token_ids) <= num_forced or draft.token_ids[:num_forced] != forced.token_ids:
        return None
    ratio = forced.survival[-1] / draft.survival[num_forced - 1]
    survival = forced.survival + [ratio * value for value in draft.survival[num_forced:]]
    return Draft(draft.token_ids, survival, draft.source, draft.key + _BEHIND_FORCED)


def _behind_in_flight(draft: Draft) -> Draft:
    """Return a draft without its first token; the survivals include that of this token."""
    return Draft(
        draft.token_ids[1:], draft.survival[1:], draft.source, draft.key + _BEHIND_IN_FLIGHT
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
            return Draft(draft.token_ids[:index], draft.survival[:index], draft.source, draft.key)
    return draft


def make_drafting(
    config: SpeculativeConfig, max_model_len: int, grammars: ForcedTokenSource | None
) -> Drafting | None:
    """Return the drafting of a configuration; None if it has no method, or none can be used.

    grammars: of the engine; None for a model whose outputs have no grammars. Without its compiled
    library `ngram` and `suffix` draft nothing, and a warning says so.
    """
    proposers: list[Proposer] = []
    if "grammar" in config.methods and grammars is not None:
        proposers.append(GrammarProposer(grammars))
    make_index = load_suffix_index()
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
                )
            )
        if "ngram" in config.methods:
            proposers.append(
                NgramProposer(
                    make_index,
                    config.prompt_lookup_min,
                    config.prompt_lookup_max,
                    config.num_speculative_tokens,
                )
            )
    elif not set(config.methods).isdisjoint(("suffix", "ngram")):
        logger.warning(
            "no drafts by suffix or ngram: engine_core/csrc/suffix_index.c is not compiled "
            "(python -m engine_core.build_native)"
        )
    if not proposers:
        return None
    names = ", ".join(proposer.name for proposer in proposers)
    logger.info("drafts by %s, up to %d tokens", names, config.max_tokens)
    return Drafting(proposers, config.max_tokens, max_model_len)
