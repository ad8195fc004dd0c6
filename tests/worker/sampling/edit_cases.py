"""Random logit edits, and their effect one by one."""

import random

from proto.messages.logit_edits import LogitEdits
from worker.sampling.logit_edits import RowEdits

VOCAB = 97

NEVER = float("-inf")


def edit_one_by_one(
    logits: list[float], edits: LogitEdits, prompt: list[int], outputs: list[int]
) -> list[float]:
    """Edit token by token, as the documentation defines the parameters."""
    scores = []
    bias = dict(zip(edits.bias_token_ids, edits.bias_values, strict=True))
    for token_id, logit in enumerate(logits):
        text = [*outputs, token_id]
        allowed = edits.allowed_token_ids is None or token_id in edits.allowed_token_ids
        if not allowed or any(tuple(text[-len(word) :]) == word for word in edits.bad_words):
            scores.append(NEVER)
            continue
        score = logit + bias.get(token_id, 0.0)
        if token_id in prompt or token_id in outputs:
            factor = edits.repetition_penalty
            score = score / factor if score > 0 else score * factor
        score -= edits.frequency_penalty * outputs.count(token_id)
        score -= edits.presence_penalty if token_id in outputs else 0.0
        scores.append(score)
    return scores


def random_edits(rng: random.Random) -> LogitEdits:
    some = lambda count: tuple(rng.sample(range(VOCAB), count))  # noqa: E731
    biased = some(rng.choice([0, 0, 1, 9]))
    allowed = some(rng.choice([1, 30])) if rng.random() < 0.3 else None
    words = [tuple(rng.choices(range(6), k=rng.randint(1, 3))) for _ in range(rng.choice([0, 12]))]
    return LogitEdits(
        presence_penalty=rng.choice([0.0, 1.5, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.3, -1.0]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.7]),
        bias_token_ids=biased,
        bias_values=tuple(rng.uniform(-100, 100) for _ in biased),
        bad_words=tuple(words),
        allowed_token_ids=allowed,
    )


def grown_edits(edits: LogitEdits, prompt: list[int], outputs: list[int]) -> RowEdits:
    """Edits created without outputs, which are then appended one by one."""
    grown = RowEdits(edits, prompt, [])
    for token_id in outputs:
        grown.append(token_id)
    return grown
