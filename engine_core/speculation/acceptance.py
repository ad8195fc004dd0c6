"""How likely drafts are accepted: what is learnt, and how fast it adapts.

    proposer            expects that a token survives with 0.6
    AcceptanceTable     such tokens were accepted 0.8 times as often as expected      ─▶ 0.48
    ProposedTokens      means of these, over proposals of the model in the workers: the engine asks
                        for the next one before it knows its tokens
    ProposalGains       what proposals brought beyond their costs

All of them are exponentially decaying sums, with a prior that is worth a few values.
"""

from collections.abc import Sequence
from typing import Final

from engine_core.speculation.proposer import Draft

FORGETTING: Final = 0.98
"""Weight of what was seen before at each new value: about 50 count, which is the length of a
paragraph, so that a change of the text is noticed within one."""
PRIOR_WEIGHT: Final = 3.0
"""Number of values that an expectation counts as, before any were seen: a few tokens are enough to
contradict it."""
PRIOR_GAINS: Final = 20.0
"""The same for gains of proposals, which differ by several tokens from one to the next."""
PRIOR_ACCEPTANCE: Final = 0.7
"""Probability that a proposed token after an accepted one is accepted, before any was seen."""
REQUEST_RATE: Final = 0.2
"""Share of a new value in the averages of one request, which has few of them."""
CONFIDENCES: Final = (0.4, 0.8)
"""Borders between proposals whose acceptance is learnt apart, by what the model expects of their
first token: a model may be right about the tokens that it is sure of, and not about others."""
NUM_BUCKETS: Final = 7
"""Buckets of positions in a draft: 0, 1, 2, 3, 4 to 7, 8 to 15, and from 16."""


def bucket_of(position: int) -> int:
    """Return which of NUM_BUCKETS a position in a draft belongs to."""
    return position if position < 4 else min(position.bit_length() + 1, NUM_BUCKETS - 1)


class KeyAcceptance:
    """Acceptance of the drafts of one source and key, by bucket: sums that forget.

    prior: weight of the ratio of the bucket before. ratios: accepted / expected.
    """

    __slots__ = ("accepted", "expected", "prior", "ratios")

    def __init__(self) -> None:
        self.prior = [PRIOR_WEIGHT] * NUM_BUCKETS
        self.accepted = [0.0] * NUM_BUCKETS
        self.expected = [0.0] * NUM_BUCKETS
        self.ratios = [1.0] * NUM_BUCKETS


class AcceptanceTable:
    """How often drafts were accepted, relative to what was expected, by (source, key, bucket).

    The expectation for a bucket is multiplied by the ratio accepted / expected of its tokens. With
    few tokens that ratio is near the one of the bucket before, and near 1 for the first bucket.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[str, int], KeyAcceptance] = {}

    def acceptance_probs(self, draft: Draft) -> list[float]:
        """Return the acceptance probabilities of a draft, corrected by what was seen of its source
        and key."""
        known = self._keys.get((draft.source, draft.key))
        if known is None:
            return draft.acceptance_probs
        ratios = known.ratios
        before = acceptance_prob = 1.0
        corrected: list[float] = []
        for position, expected in enumerate(draft.acceptance_probs):
            if before > 0.0:
                acceptance_prob *= min(1.0, expected / before * ratios[bucket_of(position)])
            corrected.append(acceptance_prob)
            before = expected
        return corrected

    def first_token_ratio(self, source: str) -> float:
        """Return accepted / expected of the first tokens of a source's drafts, at most 1."""
        accepted = expected = PRIOR_WEIGHT
        for (name, _), known in self._keys.items():
            if name == source:
                accepted += known.accepted[0]
                expected += known.expected[0]
        return min(1.0, accepted / expected)

    def record(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        """Learn that of the first num_tried tokens of a draft num_accepted were accepted.

        Of the tokens after the first wrong one nothing is known.
        """
        known = self._keys.get((draft.source, draft.key))
        if known is None:
            known = self._keys[draft.source, draft.key] = KeyAcceptance()
        before = 1.0
        for position in range(min(num_tried, num_accepted + 1, len(draft.acceptance_probs))):
            expected = draft.acceptance_probs[position]
            bucket = bucket_of(position)
            known.prior[bucket] *= FORGETTING
            known.expected[bucket] *= FORGETTING
            known.accepted[bucket] *= FORGETTING
            known.expected[bucket] += expected / before if before > 0.0 else 0.0
            known.accepted[bucket] += position < num_accepted
            before = expected
        ratio = 1.0
        for bucket in range(NUM_BUCKETS):
            prior = known.prior[bucket]
            ratio = (known.accepted[bucket] + prior * ratio) / (known.expected[bucket] + prior)
            known.ratios[bucket] = ratio


class ProposedTokens:
    """What a token of a proposal brings and costs, by position: means over proposals.

    A proposal ends before a token that is too unlikely. Such a token was not tried: it brings
    nothing, and neither a row nor a pass after it is spent.

    acceptance_probs: by position, S(k) - S(k - 1), where S(k) is the mean number of accepted tokens
        of a proposal of up to k tokens.
    shares: by position, share of the proposals which have that many tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self._survived = [0.0] * max_tokens
        self._survived_before = [0.0] * max_tokens
        self._proposed = [0.0] * max_tokens
        self._proposed_before = [0.0] * max_tokens
        self.acceptance_probs: list[float] = []
        self.shares: list[float] = []
        self._update()

    def record(self, acceptance_probs: Sequence[float], num_asked: int) -> None:
        """Learn a proposal of up to num_asked tokens. acceptance_probs: corrected by acceptance."""
        before = 1.0
        for position in range(min(num_asked, len(self._survived))):
            is_proposed = position < len(acceptance_probs)
            acceptance_prob = acceptance_probs[position] if is_proposed else 0.0
            self._survived[position] = FORGETTING * self._survived[position] + acceptance_prob
            self._survived_before[position] = FORGETTING * self._survived_before[position] + before
            self._proposed[position] = FORGETTING * self._proposed[position] + is_proposed
            self._proposed_before[position] = FORGETTING * self._proposed_before[position] + 1.0
            before = acceptance_prob
            if before <= 0.0:
                break
        self._update()

    def _update(self) -> None:
        """Multiply the ratios of the positions, each near the one before while little is known."""
        ratio, acceptance_prob, share = PRIOR_ACCEPTANCE, 1.0, 1.0
        acceptance_probs: list[float] = []
        shares: list[float] = []
        for position in range(len(self._survived)):
            survived, before = self._survived[position], self._survived_before[position]
            ratio = (survived + PRIOR_WEIGHT * ratio) / (before + PRIOR_WEIGHT)
            acceptance_prob = max(acceptance_prob * ratio, _LEAST_ACCEPTANCE)
            acceptance_probs.append(acceptance_prob)
            proposed, before = self._proposed[position], self._proposed_before[position]
            share *= (proposed + PRIOR_WEIGHT) / (before + PRIOR_WEIGHT)
            shares.append(share)
        self.acceptance_probs, self.shares = acceptance_probs, shares


_LEAST_ACCEPTANCE: Final = 1e-9
"""Above 0, because acceptance probabilities are divided by each other."""


class ProposalGains:
    """The net gain of a proposal, in tokens: those accepted less its cost, learnt from others.

    It corrects estimates, which may rest on row counts that no step had yet, or on lengths that
    proposals seldom reach.
    """

    def __init__(self) -> None:
        self._gain = self._number = 0.0

    def add_proposal(self, price: float) -> None:
        """Note a proposal whose passes cost as much as `price` tokens."""
        self._gain = FORGETTING * self._gain - price
        self._number = FORGETTING * self._number + 1.0

    def add_verified(self, num_accepted: int, price: float) -> None:
        """Note what a proposal brought, and the price of the rows that verified it, in tokens."""
        self._gain += num_accepted - price

    def correct(self, expected: float) -> float:
        """Return what a proposal brings, of which a gain of `expected` tokens is expected."""
        known = (self._gain + PRIOR_GAINS * expected) / (self._number + PRIOR_GAINS)
        return min(expected, known)
