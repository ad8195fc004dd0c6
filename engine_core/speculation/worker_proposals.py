"""Drafts by a model in the workers: its last proposals, and how many tokens it shall propose.

    step N      |x|d|d|          the last known token and a draft: the target model samples a b c
    draft model         p p p    proposes 3 tokens after c, in the time of 3 passes
    step N+1          |c|p|p|p|  verifies them, unless another proposer's draft promises more

WorkerProposer     holds the last proposal of each request, and competes with the other proposers
LookaheadPlanner   decides with each step how many tokens the model proposes after it

The tokens of a proposal come one pass after the other, so a request that takes part costs little
if others do, and a further token costs a pass. A model of its own computes the KV that it lacks
when it is asked: a prefill, which is worth its time only where enough output tokens are expected.
"""

from collections.abc import Sequence
from typing import Final

from engine_core.request import Request
from engine_core.speculation.acceptance import (
    CONFIDENCES,
    REQUEST_RATE,
    ProposalGains,
    ProposedTokens,
)
from engine_core.speculation.draft_choice import MIN_GAIN, StepCost
from engine_core.speculation.proposer import Draft

PROBE_SHARE: Final = 0.004
"""Share of the time that drafts may take which are not expected to pay."""
PROBE_TOKENS: Final = 4
"""Longest draft of this kind."""
_PRIOR_PASS_SHARE: Final = 0.1
"""Time of a pass of the draft model as a share of a step's, before one was measured."""
_PRIOR_OUTPUTS: Final = 256.0
_OUTPUTS_RATE: Final = 0.05
"""Mean number of outputs of a request, before any has ended, and how fast it follows."""
_MAX_MISSING: Final = 32
"""Tokens without draft KV up to which the next pass takes them along; more are a prefill."""
_MAX_PREFILL: Final = 2048
"""Tokens that several requests prefill after one step; a single request may have more."""
_FEW_REQUESTS: Final = 8
"""Requests up to which each is looked at in every step, as some may be better than the mean."""
_NUM_TRIAL: Final = 16
"""Number of proposals up to which the model prefills for one request at a time, at any cost."""
MAX_MIN_ACCEPTANCE: Final = 0.9
"""Acceptance probability with which a token is proposed at any price."""


class Proposal:
    """The part of a proposal after the known tokens. acceptance_probs: conditional on them."""

    __slots__ = ("acceptance_probs", "key", "token_ids")

    def __init__(self, token_ids: list[int], acceptance_probs: list[float], key: int) -> None:
        self.token_ids = token_ids
        self.acceptance_probs = acceptance_probs
        self.key = key


class WorkerProposer:
    """Proposes what a model in the workers has proposed last. method: of `MODEL_METHODS`."""

    def __init__(self, method: str) -> None:
        self.name = method
        self._proposals: dict[int, Proposal] = {}  # by seq_id

    def begin_step(self) -> None: ...

    def begin_request(self, request: Request) -> bool:
        return True

    def keep_proposal(
        self, request: Request, token_ids: list[int], acceptance_probs: Sequence[float]
    ) -> None:
        """Hold a proposal to follow `request.all_token_ids`, in place of the one before."""
        self._proposals.pop(request.seq_id, None)
        if token_ids:
            lowest = 1.0
            falling: list[float] = []
            for acceptance_prob in acceptance_probs:
                lowest = min(lowest, acceptance_prob)
                falling.append(lowest)
            key = 0
            while key < len(CONFIDENCES) and falling[0] >= CONFIDENCES[key]:
                key += 1
            self._proposals[request.seq_id] = Proposal(list(token_ids), falling, key)

    def add_outputs(self, request: Request, num_new: int) -> None:
        """Shorten a proposal that begins with the new tokens; drop one that they contradict."""
        proposal = self._proposals.get(request.seq_id)
        if proposal is None:
            return
        tokens = request.all_token_ids
        num_left = len(proposal.token_ids) - num_new
        if num_left <= 0 or tokens[len(tokens) - num_new :] != proposal.token_ids[:num_new]:
            del self._proposals[request.seq_id]
            return
        known = proposal.acceptance_probs[num_new - 1]
        if known <= 0.0:
            del self._proposals[request.seq_id]
            return
        proposal.token_ids = proposal.token_ids[num_new:]
        proposal.acceptance_probs = [
            acceptance_prob / known for acceptance_prob in proposal.acceptance_probs[num_new:]
        ]

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        proposal = self._proposals.get(request.seq_id)
        if proposal is None:
            return None
        return Draft(
            proposal.token_ids[:max_tokens],
            proposal.acceptance_probs[:max_tokens],
            self.name,
            proposal.key,
        )

    def end_request(self, request: Request) -> None:
        self._proposals.pop(request.seq_id, None)

    def forget_outputs(self) -> None: ...


class ModelRequest:
    """What the planner keeps of a request.

    num_computed: leading tokens whose KV the draft model has, as far as is known.
    first_acceptance_prob: mean probability that the first token of a proposal is accepted; None
    before there was one. other_expected: mean number of accepted tokens that the best draft of
    another proposer promises.
    """

    __slots__ = ("first_acceptance_prob", "num_computed", "other_expected")

    def __init__(self) -> None:
        self.num_computed = 0
        self.first_acceptance_prob: float | None = None
        self.other_expected = 0.0

    def first_prob(self, mean: float) -> float:
        """Return first_acceptance_prob. mean: of all requests, for one without a proposal."""
        return mean if self.first_acceptance_prob is None else self.first_acceptance_prob

    def note_other_draft(self, num_expected: float) -> None:
        """Note what the best draft of another proposer promised in a step; 0 for none."""
        self.other_expected += REQUEST_RATE * (num_expected - self.other_expected)


class LookaheadPlanner:
    """Decides how many tokens the draft model proposes for which request.

    With n requests and proposals of k tokens for m of them, the next step brings n + m · S(k)
    tokens in the time c(n + m · k), and the k passes before it take p(m) each; fewer rows and
    passes as far as proposals end early. The k is taken with the most tokens per time, 0 included.
    S comes from `ProposedTokens`; what other drafts would bring anyway is subtracted. p is learnt
    like c.

    max_tokens: of a proposal. cost: of the target model's steps. prefills: whether the model
    computes KV of a request only when it is asked.
    """

    def __init__(self, max_tokens: int, cost: StepCost, *, prefills: bool) -> None:
        self._max_tokens = max_tokens
        self._cost = cost
        self._pass_cost = StepCost()
        self._prefills = prefills
        self._tokens = ProposedTokens(max_tokens)
        self._gains = ProposalGains()
        self._num_proposals = 0
        self._mean_outputs = _PRIOR_OUTPUTS
        self._trial: ModelRequest | None = None
        self._probe_budget = 0.0  # time, in steps with one row
        self._row_price = self._pass_price = 0.0  # in tokens, of each sequence
        self.probe: ModelRequest | None = None
        self.min_acceptance_prob = 0.0

    # What is learnt

    def end_request(self, state: ModelRequest, request: Request) -> None:
        """Learn how many outputs a finished request had."""
        if self._trial is state:
            self._trial = None
        if self.probe is state:
            self.probe = None
        if request.is_finished:
            number = float(request.num_output_tokens)
            self._mean_outputs += _OUTPUTS_RATE * (number - self._mean_outputs)

    def learn_passes(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Learn the time of passes of the draft model by their rows."""
        for number, duration in zip(rows, seconds, strict=True):
            self._pass_cost.learn_step(number, duration)

    def learn_proposal(
        self, state: ModelRequest, num_known: int, num_asked: int, acceptance_probs: Sequence[float]
    ) -> None:
        """Learn a proposal of up to `num_asked` tokens, after num_known ones.

        acceptance_probs: of its tokens, corrected by acceptance. It is shorter than asked
        for where the model found no token likely enough, or a grammar refused one.
        """
        state.num_computed = num_known
        if self.probe is state and not acceptance_probs:
            self.probe = None  # nothing to verify
        self._tokens.record(acceptance_probs, num_asked)
        self._gains.add_proposal(self._pass_price * min(num_asked, len(acceptance_probs) + 1))
        first = acceptance_probs[0] if acceptance_probs else 0.0
        before = state.first_prob(self._tokens.acceptance_probs[0])
        state.first_acceptance_prob = before + REQUEST_RATE * (first - before)
        self._num_proposals += 1

    def learn_verified(self, num_tried: int, num_accepted: int) -> None:
        """Learn how many tokens of a proposal were verified, and how many of these accepted."""
        self._gains.add_verified(num_accepted, self._row_price * num_tried)

    # What is decided

    def may_pay(self, num_requests: int, num_other: int) -> bool:
        """Return whether proposals may be asked for: they pay, or the time for a probe is saved up.

        It is the quick check of a large step in which they do not.
        """
        if num_requests <= _FEW_REQUESTS:
            return True
        cost = self._cost
        if self._best_length(num_requests, num_requests, num_other, 1.0, 0.0)[0]:
            return True
        if self._probe_budget >= self._probe_time(1, num_requests + num_other):
            return True
        self._probe_budget += PROBE_SHARE * cost.cost(num_requests + num_other)
        return False

    def choose_lengths(
        self,
        states: Sequence[ModelRequest],
        requests: Sequence[Request],
        limits: Sequence[int],
        num_other: int,
    ) -> list[int]:
        """Return how many tokens the model proposes for each request after this step.

        Call it after `may_pay`. requests: those that decode, each with its limit, at least 1.
        num_other: rows of a step that belong to prompts. Sets `min_acceptance_prob`, and `probe` to
        the state of a request whose proposal shall be verified although it is not expected to pay;
        the caller sets it back to None.
        """
        num_requests = len(states)
        lengths = [0] * num_requests
        candidates = self._candidates(states, limits)
        length, gain, price = self._best_length(
            len(candidates), num_requests, num_other, *self._summary(states, candidates)
        )
        if length:
            gain = self._gains.correct(gain / len(candidates))
            joining = [
                index
                for index in candidates
                if self._joins(states[index], requests[index], len(candidates), length, gain, price)
            ]
            if self._num_proposals >= _NUM_TRIAL and len(joining) < len(candidates):
                length, _, price = self._best_length(
                    len(joining), num_requests, num_other, *self._summary(states, joining)
                )
            if length and joining:
                self._ask(states, requests, limits, joining, length, lengths)
                self._note_prices(price, len(joining), num_requests + num_other)
                return lengths
        self._probe_budget += PROBE_SHARE * self._cost.cost(num_requests + num_other)
        self._choose_probe(states, requests, limits, num_requests + num_other, lengths)
        return lengths

    def _candidates(self, states: Sequence[ModelRequest], limits: Sequence[int]) -> list[int]:
        """Return the indexes of requests for which a proposal would be worth a row.

        It has to be more than what other drafts bring.
        """
        num_requests = len(states)
        cost, mean = self._cost, self._tokens.acceptance_probs[0]
        without = cost.cost(num_requests)
        row = num_requests / without * (cost.cost(num_requests + 1) - without)
        candidates: list[int] = []
        for index, state in enumerate(states):
            first = state.first_prob(mean)
            if first > row and (
                state.other_expected == 0.0
                or self._expected_tokens(first, limits[index]) > state.other_expected + MIN_GAIN
            ):
                candidates.append(index)
        return candidates

    def _summary(
        self, states: Sequence[ModelRequest], indexes: Sequence[int]
    ) -> tuple[float, float]:
        """Return (acceptance probability of these requests by the mean, tokens of their other
        drafts)."""
        mean = self._tokens.acceptance_probs[0]
        first = other = 0.0
        for index in indexes:
            state = states[index]
            first += state.first_prob(mean)
            other += state.other_expected
        return (first / (len(indexes) * mean) if indexes else 0.0), other

    def _ask(
        self,
        states: Sequence[ModelRequest],
        requests: Sequence[Request],
        limits: Sequence[int],
        joining: Sequence[int],
        length: int,
        lengths: list[int],
    ) -> None:
        """Set the lengths of requests that take part; some prefill after a later step."""
        num_missing = 0
        for index in joining:
            missing = self._num_missing(states[index], requests[index])
            if missing > _MAX_MISSING:
                if num_missing and num_missing + missing > _MAX_PREFILL:
                    continue
                num_missing += missing
            lengths[index] = min(length, limits[index])

    def _best_length(
        self, num_part: int, num_requests: int, num_other: int, factor: float, other: float
    ) -> tuple[int, float, float]:
        """Return (tokens of a proposal, its gain in tokens a step, tokens for a unit of time).

        factor: of the acceptance probabilities of these num_part requests, relative to the mean.
        other: accepted tokens that other drafts bring them.
        """
        one_pass = self._pass_time(num_part)
        values = self._values(num_part, factor)
        rows, passes = self._rows_and_passes(num_part)
        without = self._cost.cost(num_requests)
        best_rate = num_requests / without
        total = -other
        for length, value in enumerate(values):
            total += value
            time = self._time(num_requests + rows[length]) + one_pass * passes[length]
            best_rate = max(best_rate, (num_requests + total) / time)
        num_rows = num_requests + num_other
        without = self._cost.cost(num_rows)
        best, best_gain = 0, MIN_GAIN * num_requests
        total = -other
        for length, value in enumerate(values):
            total += value
            time = self._time(num_rows + rows[length]) - without + one_pass * passes[length]
            gain = total - best_rate * time
            if gain > best_gain:
                best, best_gain = length + 1, gain
        return best, best_gain, best_rate

    def _values(self, num_part: int, factor: float) -> list[float]:
        """Return how many tokens num_part requests get by each further token of their proposals."""
        scale = 1.0
        values: list[float] = []
        for acceptance_prob in self._tokens.acceptance_probs:
            scale = min(1.0 / acceptance_prob, scale * factor)
            values.append(num_part * acceptance_prob * scale)
        return values

    def _rows_and_passes(self, num_part: int) -> tuple[list[float], list[float]]:
        """Return the rows and the passes of proposals of up to 1, 2 … tokens."""
        share, num_rows, num_passes = 1.0, 0.0, 0.0
        rows: list[float] = []
        passes: list[float] = []
        for next_share in self._tokens.shares:
            num_passes += share
            share = next_share
            num_rows += num_part * share
            rows.append(num_rows)
            passes.append(num_passes)
        return rows, passes

    def _time(self, rows: float) -> float:
        """Return the time of a step with a mean number of rows."""
        first = int(rows)
        time = self._cost.cost(first)
        return time + (rows - first) * (self._cost.cost(first + 1) - time)

    def _expected_tokens(self, first: float, limit: int) -> float:
        """Return how many tokens of a proposal are accepted whose first survives so often."""
        mean = self._tokens.acceptance_probs[0]
        factor = first / mean if mean > 0.0 else 0.0
        scale, total = 1.0, 0.0
        for position in range(min(limit, self._max_tokens)):
            scale = min(1.0 / self._tokens.acceptance_probs[position], scale * factor)
            total += self._tokens.acceptance_probs[position] * scale
        return total

    def _num_missing(self, state: ModelRequest, request: Request) -> int:
        """Return how many tokens the next pass of the draft model computes for a request."""
        if not self._prefills:
            return 1
        return request.num_computed_tokens + 2 - state.num_computed

    def _joins(
        self,
        state: ModelRequest,
        request: Request,
        num_part: int,
        length: int,
        gain: float,
        price: float,
    ) -> bool:
        """Return whether a request takes part: its KV is there, or repays to be computed.

        gain: tokens in a step. While little is known, one request is tried at a time.
        """
        missing = self._num_missing(state, request)
        if missing <= _MAX_MISSING:
            return True
        if self._num_proposals < _NUM_TRIAL:
            if self._trial is None:
                self._trial = state
            return self._trial is state
        num_outputs = request.num_output_tokens
        num_left = max(self._mean_outputs - num_outputs, self._mean_outputs / 4)
        num_left = min(num_left, float(request.max_tokens - num_outputs))
        first = state.first_prob(self._tokens.acceptance_probs[0])
        num_steps = num_left / (1.0 + self._expected_tokens(first, length))
        time = self._pass_time(num_part + missing) - self._pass_time(num_part)
        return gain * num_steps > price * time

    def _choose_probe(
        self,
        states: Sequence[ModelRequest],
        requests: Sequence[Request],
        limits: Sequence[int],
        num_rows: int,
        lengths: list[int],
    ) -> None:
        """Ask for one proposal, of the request with the least to compute, if time was saved up."""
        best, best_missing = -1, 0
        for index, state in enumerate(states):
            missing = self._num_missing(state, requests[index])
            if best < 0 or missing < best_missing:
                best, best_missing = index, missing
        if best < 0:
            return
        time = self._probe_time(best_missing, num_rows)
        if self._probe_budget < time:
            return
        self._probe_budget -= time
        self.probe = states[best]
        self.min_acceptance_prob = 0.0
        lengths[best] = min(PROBE_TOKENS, limits[best])

    def _probe_time(self, missing: int, num_rows: int) -> float:
        """Return the time of a probe: its passes, and that of the rows which verify it."""
        passes = self._pass_time(missing) + (PROBE_TOKENS - 1) * self._pass_time(1)
        return passes + self._cost.cost(num_rows + PROBE_TOKENS) - self._cost.cost(num_rows)

    def _pass_time(self, rows: int) -> float:
        """Return the time of a pass of the draft model, in steps of the target with one row."""
        share = _PRIOR_PASS_SHARE
        if self._pass_cost.unit_seconds > 0.0 and self._cost.unit_seconds > 0.0:
            share = self._pass_cost.unit_seconds / self._cost.unit_seconds
        return share * self._pass_cost.cost(rows)

    def _note_prices(self, price: float, num_part: int, num_rows: int) -> None:
        """Note what proposals of this step cost, in tokens.

        A proposal ends where the expected gain of its next token is below the cost of that.
        """
        row = self._cost.cost(num_rows + num_part) - self._cost.cost(num_rows)
        self._row_price = price * row / num_part
        self._pass_price = price * self._pass_time(num_part) / num_part
        self.min_acceptance_prob = self._row_price + self._pass_price
