"""From the scores of a step to its tokens and log-probabilities, all of it on an accelerator.

    scores ─▶ listed changes ─▶ penalties, masks ─▶ filters, draw ─▶ tokens ─▶ counts
       └────────────────── of the rows that ask ───────────────────────┴──▶ log-probabilities

Owns the order of work, which is that of sample/sampler.py, and what is sent for it. Knows rows,
and nothing of models; waits for nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from proto.scheduler_output import GrammarOutput
from worker.batch.rows import Rows
from worker.batch.wishes import LogprobWishes, ScoreWishes, logprob_wishes, score_wishes
from worker.device.accelerator import Accelerator
from worker.device.placement import OnDevice
from worker.sample.device_counts import DeviceCounts
from worker.sample.device_draw import KeyedDraw
from worker.sample.device_edits import NONE, Listed, RowChanges, ScoreEdits
from worker.sample.device_logprobs import queue_logprobs
from worker.sample.device_sampling import DeviceSampling, DrawnRows

Ids = npt.NDArray[np.int64]


class DeviceSampler:
    """Samples for the rows of one runner.

    last: int64 [rows], the last token of each row, on the device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        rows: Rows,
        last: torch.Tensor,
        vocab_size: int,
        draw: KeyedDraw,
        edits: ScoreEdits,
    ) -> None:
        self._rows = rows
        self._last = last
        self._vocab_size = vocab_size
        self._edits = edits
        self._drawing = DeviceSampling(OnDevice(accelerator), draw)
        self._counts = DeviceCounts(accelerator, vocab_size, len(rows.num_tokens), rows.edits.get)
        self._sent_edits = OnDevice(accelerator)
        self._sent_logprobs = OnDevice(accelerator)

    def logprobs_of(self, at: Ids, handles: Sequence[int]) -> LogprobWishes:
        """What the rows `at` [N] with these handles want; before they get another token."""
        return logprob_wishes(self._rows, at, handles)

    def sample(
        self,
        scores: torch.Tensor,
        at: Ids,
        handles: Sequence[int],
        grammars: GrammarOutput,
        logprobs: LogprobWishes,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Tokens int64 [N] for scores [N, V], which stay as they are; as `queue_logprobs` says.

        at: int64 [N], rows of the sequences, each with at most one token that is not known.
        """
        wishes = score_wishes(self._rows, at, handles, grammars, self._vocab_size)
        edited = scores
        penalised = [each.row for each in wishes.penalised]
        slots = self._counts.slots_of(
            penalised,
            [each.edits for each in wishes.penalised],
            [each.num_outputs for each in wishes.penalised],
        )
        if wishes:
            edited, counted, slots_there = self._edit(scores, wishes, slots)
        token_ids = self._drawing.tokens(edited, self._drawn(at))
        if penalised:
            self._counts.add(penalised, slots_there, token_ids.index_select(0, counted))
        return token_ids, self._logprobs(scores, token_ids, logprobs) if logprobs else []

    def _edit(
        self, scores: torch.Tensor, wishes: ScoreWishes, slots: Ids
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Changed scores float32 [N, V]; of the penalised rows, which they are and their slots."""
        of_each = np.full(len(wishes.at), NONE, dtype=np.int64)
        numbers = [each.number for each in wishes.penalised]
        of_each[numbers] = slots
        sent = self._sent_edits.send(
            [
                *wishes.listed,
                wishes.at,
                of_each,
                wishes.masks,
                wishes.rules,
                wishes.words,
                wishes.at[numbers],
                slots,
            ]
        )
        listed, (at, slot_of, masks, rules, words, counted, slots_there) = sent[:4], sent[4:]
        wide = scores.to(torch.float32, copy=True).contiguous()
        if len(wishes.listed[0]):
            self._edits.add_listed(wide, Listed(*listed), self._last)
        if len(wishes.at):
            changes = RowChanges(
                at, slot_of, masks, rules.view(-1, 3), words.view(-1, wishes.words.shape[1])
            )
            self._edits.change_rows(wide, changes, self._counts.counts)
        return wide, counted, slots_there

    def _logprobs(
        self, scores: torch.Tensor, token_ids: torch.Tensor, wanted: LogprobWishes
    ) -> list[torch.Tensor]:
        width = max(map(len, wanted.named))
        named = np.zeros((len(wanted.at), width), dtype=np.int64)
        for row, ids in enumerate(wanted.named):
            named[row, : len(ids)] = ids
        at, names = self._sent_logprobs.send([wanted.at, named])
        num_best = int(wanted.num_logprobs.max())
        return queue_logprobs(scores, at, token_ids, num_best, names.view(named.shape))

    def _drawn(self, at: Ids) -> DrawnRows:
        rows = self._rows
        position = rows.num_tokens[at] - rows.num_prompt_tokens[at]
        return DrawnRows(
            rows.temperature[at],
            rows.top_k[at],
            rows.top_p[at],
            rows.min_p[at],
            rows.seed[at],
            rows.choice[at],
            position.astype(np.uint32),
        )
