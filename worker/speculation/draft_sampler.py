"""Drafts in the making: which sequences get one, how its tokens are drawn, and where it ends.

Tokens are drawn with the noise of the sequence's own draws (worker/sampling/cpu_kernels.py), its
filters and logit edits: the more alike two models are, the more often both draw the same token.
Grammars are not applied; the engine cuts drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from proto.sampling_params import GREEDY_TEMPERATURE
from worker.input_batch import NO_LOGPROBS, InputBatch
from worker.sampling.logit_edits import RowEdits
from worker.sampling.sampler import Sampler, SamplingBatch
from worker.speculation.drafter import Drafts, SampledStep


@dataclass(slots=True)
class OpenDraft:
    """The draft of a sequence in the step in which it is made.

    sequence: its index in the step. num_tokens: known tokens of the sequence. most: tokens of the
    longest draft. edits: logit edits behind the draft; None without any.
    token_ids, survivals: as in Drafts.
    """

    sequence: int
    seq_id: int
    row: int
    num_tokens: int
    most: int
    edits: RowEdits | None
    stop_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    survivals: list[float] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """The position of the last token, those of the draft included."""
        return self.num_tokens + len(self.token_ids) - 1


class DraftSampler:
    """Begins and extends the drafts of the sequences in `batch`.

    max_model_len: tokens that a sequence may have with its draft.
    """

    def __init__(self, batch: InputBatch, sampler: Sampler, max_model_len: int) -> None:
        self._batch = batch
        self._sampler = sampler
        self._max_model_len = min(max_model_len, batch.token_ids.shape[1] - 1)

    def begin(self, step: SampledStep) -> list[OpenDraft]:
        """Return an empty draft for each sequence with lookahead, in their order."""
        batch, found = self._batch, []
        for sequence in np.flatnonzero(step.num_lookahead).tolist():
            seq_id, row = step.seq_ids[sequence], int(step.inputs.rows[sequence])
            num_tokens = int(batch.num_tokens[row])
            most = min(int(step.num_lookahead[sequence]), self._max_model_len - num_tokens)
            if most <= 0:
                continue
            edits = batch.edits[row].after(()) if row in batch.edits else None
            stop_ids = batch.params(seq_id).stop_ids
            found.append(OpenDraft(sequence, seq_id, row, num_tokens, most, edits, stop_ids))
        return found

    def extend(
        self, drafts: Sequence[OpenDraft], logits: torch.Tensor, min_survival: float
    ) -> list[int]:
        """Append a token to each draft; return the indices of those that go on.

        logits: float32 [D, V] of the served model's vocabulary; they are overwritten.
        """
        token_ids, probabilities = self._draw(drafts, logits)
        going_on = []
        for index, (draft, token_id, probability) in enumerate(
            zip(drafts, token_ids.tolist(), probabilities.tolist(), strict=True)
        ):
            survival = probability * (draft.survivals[-1] if draft.survivals else 1.0)
            if not survival >= min_survival:  # NaN, too
                continue
            # The draft does not count in the row before the engine schedules it.
            self._batch.token_ids[draft.row, draft.last_position + 1] = token_id
            draft.token_ids.append(token_id)
            draft.survivals.append(survival)
            if draft.edits is not None:
                draft.edits.append(token_id)
            if len(draft.token_ids) < draft.most and token_id not in draft.stop_ids:
                going_on.append(index)
        return going_on

    def _draw(
        self, drafts: Sequence[OpenDraft], logits: torch.Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the next token of each draft [D], and its probability: NaN if none is defined.

        logits: float32 [D, V]; they are overwritten.
        """
        batch = self._batch
        broken = ~logits.amax(dim=1).isfinite()
        logits[broken] = 0.0
        rows = np.array([draft.row for draft in drafts])
        output_index = np.array([draft.last_position + 1 for draft in drafts])
        output_index -= batch.num_prompt_tokens[rows]
        params = batch.row_params[rows]
        params["position"] = output_index
        edits = [(index, each.edits) for index, each in enumerate(drafts) if each.edits is not None]
        is_early = output_index < batch.min_output[rows]
        suppressed = [
            (index, np.array(sorted(drafts[index].stop_ids), dtype=np.int64))
            for index in np.flatnonzero(is_early).tolist()
        ]
        no_logprobs = np.full(len(drafts), NO_LOGPROBS, dtype=np.int32)
        token_ids, _ = self._sampler.sample(
            logits, SamplingBatch(params, no_logprobs, suppressed, edits)
        )
        temperature = params["temperature"]
        temperature[temperature < GREEDY_TEMPERATURE] = 1.0
        scaled = logits.div_(torch.from_numpy(temperature)[:, None])
        chosen = scaled.gather(1, torch.from_numpy(token_ids)[:, None])[:, 0]
        probabilities = (chosen - scaled.logsumexp(dim=1)).exp().clamp(max=1.0)
        probabilities[broken] = float("nan")
        return token_ids, probabilities.numpy()


def finished(drafts: Sequence[OpenDraft], made: Drafts) -> Drafts:
    """Return `made` with these drafts, of which some may be empty."""
    for draft in drafts:
        made.seq_ids.append(draft.seq_id)
        made.token_ids.append(draft.token_ids)
        made.survivals.append(draft.survivals)
    return made
