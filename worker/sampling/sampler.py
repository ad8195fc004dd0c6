"""From rows of logits to tokens, on the host. The stages, in order:

    raw logprobs   kept from the model's logits, only for rows that request them
    forbidden      −inf for all but allowed_token_ids, for tokens that would complete a bad
                   word, and for stop tokens before min_tokens
    bias           logit_bias is added
    penalties      repetition, then frequency and presence, see logit_edits.py
    grammars       −inf for tokens that a grammar mask rules out, only in constrained rows
    greedy rows    argmax, lowest id among equals
    filters        on logits / T, see FILTERS in row_params.py; only for rows that have one
    draw           Gumbel-max of logits / T, keyed by (seed, choice, position)

`StepSampler` (worker/step/step_sampler.py) chooses the rows of a step. Most rows need only their
best token, which it finds in the same pass that looks for NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proto.messages.engine_io import LogprobsArrays
from proto.messages.sampling_params import GREEDY_TEMPERATURE
from worker.sampling.backend import SamplingBackend
from worker.sampling.logit_edits import EditsByRow, RowMask, apply_grammar_masks
from worker.sampling.logprobs import NO_LOGPROBS, named_logprobs, row_logprobs
from worker.sampling.row_params import RowParams, needs_filter


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of N rows of logits.

    params: records [N]; a temperature below GREEDY_TEMPERATURE makes the row greedy.
    num_logprobs: int32 [N], alternatives beside the sampled token, NO_LOGPROBS for none.
    suppressed: (row, int64 token ids) pairs; these tokens cannot be chosen.
    edits: (row, logit edits) pairs, for rows that have some.
    named: (row, int64 token ids) pairs; logprobs of these tokens instead of the best ones.
    masks: of the rows constrained by a grammar.
    """

    params: RowParams
    num_logprobs: npt.NDArray[np.int32]
    suppressed: Sequence[tuple[int, npt.NDArray[np.int64]]] = ()
    edits: EditsByRow = ()
    named: Sequence[tuple[int, npt.NDArray[np.int64]]] = ()
    masks: Sequence[RowMask] = ()


class Sampler:
    """Samples one token for each row of a batch of logits; has no state between steps."""

    def __init__(self, backend: SamplingBackend) -> None:
        self.backend = backend

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch
    ) -> tuple[npt.NDArray[np.int64], list[LogprobsArrays | None]]:
        """Return tokens int64 [N] and the log-probabilities of rows that request some.

        logits: float32 [N, V]; they are overwritten.
        """
        with_logprobs = np.flatnonzero(batch.num_logprobs != NO_LOGPROBS)
        raw = logits[torch.from_numpy(with_logprobs)] if len(with_logprobs) else logits[:0]
        for row, token_ids in batch.suppressed:
            logits[row, torch.from_numpy(token_ids)] = float("-inf")
        if batch.edits:
            self.backend.edit(logits, batch.edits)
        apply_grammar_masks(logits, batch.masks)
        tokens = self._choose_tokens(logits, batch.params)
        return tokens, _spread_logprobs(raw, with_logprobs, tokens, batch)

    def _choose_tokens(self, logits: torch.Tensor, params: RowParams) -> npt.NDArray[np.int64]:
        random = params["temperature"] >= GREEDY_TEMPERATURE
        if not random.any():
            return self.backend.best(logits).token_ids
        token_ids = np.empty(logits.shape[0], dtype=np.int64)
        if not random.all():
            greedy = np.flatnonzero(~random)
            token_ids[greedy] = self.backend.best(logits[torch.from_numpy(greedy)]).token_ids
        filtered = np.flatnonzero(random & needs_filter(params))
        if len(filtered):
            self.backend.filter(logits, filtered, params[filtered])
        drawn = np.flatnonzero(random)
        token_ids[drawn] = self.backend.draw(logits, drawn, params[drawn])
        return token_ids


def _spread_logprobs(
    raw: torch.Tensor,
    rows: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
    batch: SamplingBatch,
) -> list[LogprobsArrays | None]:
    """Return [N] log-probabilities of the sampled tokens, None for rows other than `rows`.

    raw: logits float32 [W, V] of the `rows` int64 [W].
    """
    spread: list[LogprobsArrays | None] = [None] * len(token_ids)
    if len(rows):
        position = batch.params["position"]
        packed = row_logprobs(raw, token_ids[rows], batch.num_logprobs[rows], position[rows])
        for row, arrays in zip(rows.tolist(), packed, strict=True):
            spread[row] = arrays
        index_of = {row: index for index, row in enumerate(rows.tolist())}
        for row, named in batch.named:
            spread[row] = named_logprobs(
                raw[index_of[row]], int(token_ids[row]), named, int(position[row])
            )
    return spread
