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
NEVER = float("-inf")


def edit_logits(logits: torch.Tensor, edits: Edits) -> None:
    """Change logits float32 [N, V] in place; edits: (row, what to change) pairs."""
    for row, each in edits:
        if each.allowed is not None:
            _keep_only(logits[row], torch.from_numpy(each.allowed).to(logits.device))
    forbidden = [(row, np.array(each.forbidden, dtype=np.int64)) for row, each in edits]
    places = _places(forbidden, logits.device)
    if len(places[0]):
        logits[places] = NEVER
    places = _places([(row, each.bias_ids) for row, each in edits], logits.device)
    if len(places[0]):
        values = np.concatenate([each.bias_values for _, each in edits])
        logits[places] += torch.from_numpy(values).to(logits.device)
    _penalise(logits, edits)


def _keep_only(scores: torch.Tensor, allowed: torch.Tensor) -> None:
    """Forbid all tokens of scores [V] but these."""
    kept = scores[allowed]
    scores.fill_(NEVER)
    scores[allowed] = kept


def _penalise(logits: torch.Tensor, edits: Edits) -> None:
    places = _places([(row, each.counts.ids) for row, each in edits], logits.device)
    if not len(places[0]):
        return
    lengths = [len(each.counts.ids) for _, each in edits]
    repetition, frequency, presence = (
        torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(logits.device)
        for values in zip(
            *((each.repetition, each.frequency, each.presence) for _, each in edits), strict=True
        )
    )
    counts = torch.from_numpy(np.concatenate([each.counts.counts for _, each in edits]))
    counts = counts.to(logits.device)
    scores = logits[places]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    logits[places] = scores - frequency * counts - presence * (counts > 0)


def _places(
    named: Sequence[tuple[int, npt.NDArray[np.int64]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and token ids int64 [P] of (row, token ids) pairs."""
    lengths = [len(ids) for _, ids in named]
    rows = np.repeat(np.array([row for row, _ in named], dtype=np.int64), lengths)
    ids = np.concatenate([ids for _, ids in named])
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)
