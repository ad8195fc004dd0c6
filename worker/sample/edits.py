"""Changes of scores that requests ask for, made for all rows of a step at once.

Works on index lists over the whole batch: the cost is that of the tokens that are named or
were said, and rows that change nothing have no part in it. The order is

    allowed     −inf for all but the allowed tokens
    forbidden   −inf for tokens that would complete a bad word
    bias        is added
    penalties   repetition: a score above 0 is divided, one below multiplied;
                then − frequency · count − presence · (count > 0)

which is that of vLLM's sampler: bias counts before penalties, and neither brings back a
token that is forbidden.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from worker.sample.row_edits import RowEdits

Edits = Sequence[tuple[int, RowEdits]]
Scores = npt.NDArray[np.float32]
NEVER = np.float32("-inf")


def edit_logits(logits: torch.Tensor, edits: Edits) -> None:
    """Change logits float32 [N, V], contiguous and on the host, in place.

    edits: (row, what to change) pairs.
    """
    scores = logits.numpy()
    for row, each in edits:
        if each.allowed is not None:
            _keep_only(scores[row], each.allowed)
    flat = logits.view(-1).numpy()
    width = logits.shape[1]
    forbidden = [row * width + each for row, edit in edits for each in edit.forbidden]
    if forbidden:
        flat[forbidden] = NEVER
    biased = [(row, each) for row, each in edits if len(each.bias_ids)]
    if biased:
        places = np.concatenate([row * width + each.bias_ids for row, each in biased])
        flat[places] += np.concatenate([each.bias_values for _, each in biased])
    penalised = [(row, each) for row, each in edits if len(each.counts.ids)]
    if penalised:
        _penalise(flat, width, penalised)


def _keep_only(scores: Scores, allowed: npt.NDArray[np.int64]) -> None:
    """Forbid all tokens of scores [V] but these."""
    kept = scores[allowed]
    scores.fill(NEVER)
    scores[allowed] = kept


def _penalise(flat: Scores, width: int, edits: Edits) -> None:
    """flat [N * V]: rows of `width` scores one after the other."""
    places = np.concatenate([row * width + each.counts.ids for row, each in edits])
    counts = np.concatenate([each.counts.counts for _, each in edits])
    lengths = [len(each.counts.ids) for _, each in edits]
    rules = np.array([(e.repetition, e.frequency, e.presence) for _, e in edits], dtype=np.float32)
    repetition, frequency, presence = np.repeat(rules, lengths, axis=0).T
    scores = flat[places]
    scores = np.where(scores > 0, scores / repetition, scores * repetition)
    flat[places] = scores - frequency * counts - presence * (counts > 0)
