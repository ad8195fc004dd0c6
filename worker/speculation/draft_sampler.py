"""Sampling of drafts: which sequences get one, how its tokens are drawn, and where it ends.

Tokens are drawn with the noise of the sequence's own draws (worker/sampling/backend.py), its
filters and logit edits: the more alike two models are, the more often both draw the same token.
Grammars are not applied; the engine cuts drafts. `host_draw` draws on the host, DeviceDraftDraw
(worker/cuda/sampling/draft_draw.py) on a GPU.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from proto.messages.sampling_params import GREEDY_TEMPERATURE
from worker.batch.input_batch import InputBatch
from worker.batch.step_inputs import StepInputs
from worker.sampling.logit_edits import RowEdits
from worker.sampling.logprobs import NO_LOGPROBS
from worker.sampling.row_params import RowParams
from worker.sampling.sampler import Sampler, SamplingBatch


@dataclass(slots=True)
class OpenDraft:
    """The draft of a sequence in the step in which it is made.

    sequence: its index in the step. num_tokens: known tokens of the sequence. most: tokens of the
    longest draft. edits: logit edits behind the draft; None without any.
    token_ids, acceptance_probs: as in Drafts. replaced_ids: tokens of the row in whose
    place the draft stands until it ends.
    """

    sequence: int
    seq_id: int
    row: int
    num_tokens: int
    most: int
    edits: RowEdits | None
    stop_ids: frozenset[int]
    replaced_ids: NDArray[np.int32]
    token_ids: list[int] = field(default_factory=list)
    acceptance_probs: list[float] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """The position of the last token, those of the draft included."""
        return self.num_tokens + len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step of the served model whose tokens are in the batch; S sequences.

    inputs: its arrays. seq_ids: [S], in their order.
    states: what `keep_states` returned for it.
    num_tokens: int64 [S], known tokens of each sequence behind this step, without what later steps
        added; 0 if the sequence is not in its row any more.
    num_lookahead: int64 [S], most tokens to propose for each sequence; 0 for no draft. The block
        table of a sequence has room for that many behind the tokens of the step.
    min_acceptance_prob: acceptance probability below which a draft ends.
    """

    inputs: StepInputs
    seq_ids: Sequence[int]
    states: torch.Tensor | None
    num_tokens: NDArray[np.int64]
    num_lookahead: NDArray[np.int64]
    min_acceptance_prob: float


@dataclass(slots=True)
class Drafts:
    """Proposals for the next step, and the passes that made them.

    seq_ids, token_ids, acceptance_probs: parallel; sequences for which there was a choice, and
        their drafts, which may be empty. The acceptance probability of a token is the probability
        that it and all before it are accepted, as the drafter has it.
    pass_rows, pass_seconds: parallel, tokens and time of each pass of the drafter's model.
    """

    seq_ids: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    acceptance_probs: list[list[float]] = field(default_factory=list)
    pass_rows: list[int] = field(default_factory=list)
    pass_seconds: list[float] = field(default_factory=list)

    def add_pass(self, num_rows: int, started: float) -> float:
        """Note a pass of this many tokens that began at `started`; return the time now."""
        now = time.monotonic()
        self.pass_rows.append(num_rows)
        self.pass_seconds.append(now - started)
        return now

    def add_drafts(self, drafts: Sequence[OpenDraft]) -> None:
        """Add drafts as they are, of which some may be empty."""
        for draft in drafts:
            self.seq_ids.append(draft.seq_id)
            self.token_ids.append(draft.token_ids)
            self.acceptance_probs.append(draft.acceptance_probs)


@dataclass(frozen=True, slots=True)
class DraftDraws:
    """The next tokens of D drafts, to be drawn.

    params: records [D], keyed by output index. edits: (index, logit edits) of drafts with some.
    suppressed: (index, token ids) of drafts whose stop tokens are still forbidden.
    """

    params: RowParams
    edits: list[tuple[int, RowEdits]]
    suppressed: list[tuple[int, NDArray[np.int64]]]

    @property
    def divisors(self) -> NDArray[np.float32]:
        """Temperatures, float32 [D]; 1 for a draft that takes the best token."""
        found: NDArray[np.float32] = self.params["temperature"].copy()
        found[found < GREEDY_TEMPERATURE] = 1.0
        return found


DraftDraw = Callable[[torch.Tensor, DraftDraws], tuple[NDArray[np.int64], NDArray[np.float32]]]
"""Draws tokens where the logits are: takes logits float32 [D, V], which may be overwritten, and
returns the next token of each draft [D], and its probability: NaN if none is defined."""


class DraftSampler:
    """Begins, extends and ends the drafts of the sequences in `batch`.

    While a draft grows, its tokens stand in the row behind the known ones; `end` puts back what
    later steps had written there.

    max_model_len: tokens that a sequence may have with its draft.
    """

    def __init__(self, batch: InputBatch, draw: DraftDraw, max_model_len: int) -> None:
        self._batch = batch
        self._draw = draw
        self._max_model_len = min(max_model_len, batch.token_ids.shape[1] - 1)

    def begin(self, step: SampledStep) -> list[OpenDraft]:
        """Return an empty draft for each sequence with lookahead, in their order."""
        batch, found = self._batch, []
        for sequence in np.flatnonzero(step.num_lookahead).tolist():
            seq_id, row = step.seq_ids[sequence], int(step.inputs.rows[sequence])
            num_tokens = int(step.num_tokens[sequence])
            most = min(int(step.num_lookahead[sequence]), self._max_model_len - num_tokens)
            if most <= 0:
                continue
            edits = batch.edits[row].after(()) if row in batch.edits else None
            stop_ids = batch.params(seq_id).stop_ids
            replaced = batch.token_ids[row, num_tokens : num_tokens + most].copy()
            found.append(
                OpenDraft(
                    sequence=sequence,
                    seq_id=seq_id,
                    row=row,
                    num_tokens=num_tokens,
                    most=most,
                    edits=edits,
                    stop_ids=stop_ids,
                    replaced_ids=replaced,
                )
            )
        return found

    def end(self, drafts: Sequence[OpenDraft]) -> None:
        """Take all drafts that were begun out of their rows."""
        for draft in drafts:
            first, replaced = draft.num_tokens, draft.replaced_ids
            self._batch.token_ids[draft.row, first : first + len(replaced)] = replaced

    def extend(
        self, drafts: Sequence[OpenDraft], logits: torch.Tensor, min_acceptance_prob: float
    ) -> list[int]:
        """Append a token to each draft; return the indices of those that go on.

        logits: float32 [D, V] of the served model's vocabulary; they are overwritten.
        """
        token_ids, probabilities = self._draw(logits, self._draws(drafts))
        going_on = []
        for index, (draft, token_id, probability) in enumerate(
            zip(drafts, token_ids.tolist(), probabilities.tolist(), strict=True)
        ):
            acceptance_prob = probability * (
                draft.acceptance_probs[-1] if draft.acceptance_probs else 1.0
            )
            if not acceptance_prob >= min_acceptance_prob:  # NaN, too
                continue
            self._batch.token_ids[draft.row, draft.last_position + 1] = token_id
            draft.token_ids.append(token_id)
            draft.acceptance_probs.append(acceptance_prob)
            if draft.edits is not None:
                draft.edits.append(token_id)
            if len(draft.token_ids) < draft.most and token_id not in draft.stop_ids:
                going_on.append(index)
        return going_on

    def _draws(self, drafts: Sequence[OpenDraft]) -> DraftDraws:
        batch = self._batch
        rows = np.array([draft.row for draft in drafts])
        output_index = np.array([draft.last_position + 1 for draft in drafts])
        output_index -= batch.num_prompt_tokens[rows]
        params = batch.row_params[rows]
        params["position"] = output_index
        is_early = output_index < batch.min_output[rows]
        return DraftDraws(
            params,
            [(index, each.edits) for index, each in enumerate(drafts) if each.edits is not None],
            [
                (index, np.array(sorted(drafts[index].stop_ids), dtype=np.int64))
                for index in np.flatnonzero(is_early).tolist()
            ],
        )


def host_draw(sampler: Sampler) -> DraftDraw:
    """Return a DraftDraw on a CPU."""

    def draw_tokens(
        logits: torch.Tensor, draws: DraftDraws
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        broken = ~logits.amax(dim=1).isfinite()
        logits[broken] = 0.0
        no_logprobs = np.full(len(logits), NO_LOGPROBS, dtype=np.int32)
        batch = SamplingBatch(draws.params, no_logprobs, draws.suppressed, draws.edits)
        token_ids, _ = sampler.sample(logits, batch)
        scaled = logits.div_(torch.from_numpy(draws.divisors)[:, None])
        probabilities = probabilities_of(scaled, torch.from_numpy(token_ids))
        probabilities[broken] = float("nan")
        return token_ids, probabilities.numpy()

    return draw_tokens


def probabilities_of(scaled: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the probability of each token, float32 [D]; scaled: logits over temperatures."""
    chosen = scaled.gather(1, token_ids[:, None])[:, 0]
    return (chosen - scaled.logsumexp(dim=1)).exp().clamp(max=1.0)
