"""Two settings' log-probabilities of the same tokens, and what lies between them.

    perplexity      exp of the mean negative log-probability of the tokens that are there
    KL divergence   of the exact distribution to the other one, mean over the tokens. Of each,
                    only the likeliest tokens are known: those that both name count singly and
                    all others as one, which can only make the divergence smaller.

Knows nothing of daemons.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """What a setting said of one token. top: log-probabilities of likely ids and of this one."""

    token_id: int
    logprob: float
    top: dict[int, float]


def perplexity(predictions: Sequence[Prediction]) -> float:
    """Of at least one token."""
    return math.exp(-math.fsum(each.logprob for each in predictions) / len(predictions))


def mean_divergence(exact: Sequence[Prediction], other: Sequence[Prediction]) -> float:
    """Nats a token, over the same tokens."""
    pairs = zip(exact, other, strict=True)
    return math.fsum(divergence(a, b) for a, b in pairs) / len(exact)


def mean_mass(exact: Sequence[Prediction], other: Sequence[Prediction]) -> float:
    """Part of the exact probability, 0 to 1, that is compared token by token."""
    pairs = zip(exact, other, strict=True)
    return math.fsum(math.exp(a.top[i]) for a, b in pairs for i in a.top.keys() & b.top.keys()) / (
        len(exact)
    )


def divergence(exact: Prediction, other: Prediction) -> float:
    """Nats from the exact distribution to the other one, of one token."""
    assert exact.token_id == other.token_id, "they were asked for other tokens"
    shared = exact.top.keys() & other.top.keys()
    total = math.fsum(
        math.exp(exact.top[i]) * (exact.top[i] - other.top[i]) for i in sorted(shared)
    )
    rest = _rest(exact, shared)
    if rest > 0.0:
        total += rest * math.log(rest / max(_rest(other, shared), math.ulp(1.0)))
    return total


def _rest(prediction: Prediction, shared: set[int]) -> float:
    """Probability of all tokens but the shared ones."""
    return max(0.0, 1.0 - math.fsum(math.exp(prediction.top[i]) for i in sorted(shared)))
