"""From the scores of a step to its tokens and log-probabilities, all of it on an accelerator.

    scores ─▶ listed changes ─▶ penalties, masks ─▶ filters, draw ─▶ tokens ─▶ counts
       └────────────────── of the rows that ask ───────────────────────┴──▶ log-probabilities

Owns the order of work, which is that of sample/sampler.py, and what is sent for it. Knows rows,
and nothing of models; waits for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from proto.engine_io import LogprobsArrays
from proto.sampling_params import GREEDY_TEMPERATURE
from proto.scheduler_output import GrammarOutput
from worker.device.accelerator import Accelerator
from worker.device.placement import OnDevice, Placement
from worker.input_batch import (
    BatchLogitEdits,
    InputBatch,
    LogprobRequests,
    batch_logit_edits,
    logprob_requests,
)
from worker.sampling.device_draw import KeyedDraw
from worker.sampling.device_edits import NONE, DeviceCounts, Listed, RowChanges, ScoreEdits
from worker.sampling.draw import order_keys, ordered_bits, token_ids_of, token_ranks

# Min-p, top-k and top-p on a device, without waiting for it; what filters.py defines.
#
# No vocabulary is sorted. What top-p looks through is decided on the host, by the settings alone:
# as many of the best tokens as the largest top-k, where every row with a top-p has one. Else the
# score of the last token that it keeps is searched for, a bit at a time:
#
#     scores    [ 3.1 | 2.0 | 2.0 | 2.0 | 0.4 | … ]      p = 0.9
#     shares      .5    .16   .16   .16   .01            of those above 2.0: .5; from 2.0 on: .98
#     kept      [  x  |  x  |  x  |  x  |     |   ]      of equal scores the lowest ids, until p


_WORST = torch.iinfo(torch.int64).min
_SCORE_BITS = 32


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """Which filters the rows of a step need, known on the host.

    most_k: largest top-k below the size of the vocabulary; 0 where no row has one.
    bounded: every row with a top-p has a top-k, too.
    """

    min_p: bool
    most_k: int
    top_p: bool
    bounded: bool

    @staticmethod
    def of(
        top_k: npt.NDArray[np.int32],
        top_p: npt.NDArray[np.float32],
        min_p: npt.NDArray[np.float32],
        vocab_size: int,
    ) -> "FilterPlan":
        """For the rows with these settings."""
        limited = (top_k > 0) & (top_k < vocab_size)
        most_k = int(top_k[limited].max(initial=0))
        nucleus = top_p < 1
        bounded = bool((limited | ~nucleus).all())
        return FilterPlan(bool((min_p > 0).any()), most_k, bool(nucleus.any()), bounded)


def filter_on_device(
    logits: torch.Tensor,
    plan: FilterPlan,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Logits float32 [N, V] with −inf over the tokens that are out; the best one always stays.

    temperature: float32 [N], above 0. top_k: int64 [N]. top_p, min_p: float64 [N].
    """
    scores = logits / temperature[:, None]
    if plan.min_p:
        limit = scores.amax(dim=1) + min_p.log()
        scores = scores.masked_fill(scores < limit[:, None], float("-inf"))
    if plan.most_k:
        keys = order_keys(scores)
        best = keys.topk(plan.most_k, dim=1).values
        last = best.gather(1, top_k.clamp(1, plan.most_k)[:, None] - 1)
        limited = (top_k > 0) & (top_k < logits.shape[1])
        scores = _drop(scores, keys, last, limited)
    if plan.top_p and plan.bounded:
        keys = order_keys(scores)
        best = keys.topk(plan.most_k, dim=1).values
        log_total = scores.logsumexp(dim=1, keepdim=True)
        shares = (scores.gather(1, token_ids_of(best)) - log_total).exp()
        reached = shares.cumsum(dim=1, dtype=torch.float64)
        # The token at which the sum reaches p is the last one in.
        place = (reached < top_p[:, None]).sum(dim=1, keepdim=True).clamp(max=plan.most_k - 1)
        scores = _drop(scores, keys, best.gather(1, place), top_p < 1)
    elif plan.top_p:
        scores = scores.masked_fill(~_nucleus(scores, top_p), float("-inf"))
    return logits.masked_fill(scores == float("-inf"), float("-inf"))


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Bool [N, V]: the smallest set of best tokens whose probability reaches top_p [N].

    Sums are float64, of shares that are rounded to float32, as on the host.
    """
    wanted = top_p[:, None]
    order = ordered_bits(scores)
    shares = (scores - scores.logsumexp(dim=1, keepdim=True)).exp()

    def share_from(least: torch.Tensor) -> torch.Tensor:
        """Of all tokens whose score is at least this one, float64 [N, 1]."""
        chosen = shares.masked_fill(order < least.to(torch.int32), 0.0)
        return chosen.sum(dim=1, keepdim=True, dtype=torch.float64)

    # From `low` on p is reached, from `high` on it is not; or it is never reached.
    low = torch.full_like(wanted, -(1 << _SCORE_BITS - 1), dtype=torch.int64)
    high = -low
    for _ in range(_SCORE_BITS):
        middle = (low + high) >> 1
        reached = share_from(middle) >= wanted
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    above, equal = order > low, order == low
    tied = shares.masked_fill(~equal, 0.0)
    before = shares.masked_fill(~above, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
    # The token at which the sum reaches p is the last one in.
    before = before + tied.cumsum(dim=1, dtype=torch.float64) - tied
    return above | (equal & (before < wanted)) | (top_p >= 1)[:, None]


def _drop(
    scores: torch.Tensor, keys: torch.Tensor, last: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """−inf behind the key `last` [N, 1] of those `rows`, bool [N]."""
    limit = torch.where(rows[:, None], last, _WORST)
    return scores.masked_fill(keys < limit, float("-inf"))


# Log-probabilities on a device: what logprobs.py defines, queued with the tokens they are of.
#
# Only rows that ask are looked at, in chunks. Nothing is waited for: which of several equal
# scores comes first is decided by keys over the whole row.


CHUNK_BYTES: Final = 64 << 20
"""Most bytes of float32 scores that are looked at at once."""


def queue_logprobs(
    scores: torch.Tensor,
    at: torch.Tensor,
    token_ids: torch.Tensor,
    num_best: int,
    named: torch.Tensor,
) -> list[torch.Tensor]:
    """Ids int32 and log-probabilities float32 [W, 1 + num_best + M], ranks int32 [W].

    scores: [N, V] of any floating dtype, as they come from the model. at: int64 [W], the rows
    that ask. token_ids: int64 [N], chosen. named: int64 [W, M], looked up as well. Columns
    are the chosen token, the best ones in order, the named ones.
    """
    rows_at_once = max(1, CHUNK_BYTES // (4 * scores.shape[1]))
    parts = [
        _columns(scores, each, token_ids, num_best, ids)
        for each, ids in zip(
            torch.split(at, rows_at_once), torch.split(named, rows_at_once), strict=True
        )
    ]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def pack_logprobs(
    found: Sequence[npt.NDArray[Any]],
    num_logprobs: npt.NDArray[np.int32],
    positions: npt.NDArray[np.uint32],
    named: Sequence[Sequence[int]],
) -> list[LogprobsArrays]:
    """What `queue_logprobs` has found, flat and on the host, for each of W rows by itself."""
    num_rows = len(num_logprobs)
    ids, values = (each.reshape(num_rows, -1) for each in found[:2])
    num_best = ids.shape[1] - 1 - max(map(len, named))
    packed = []
    for row, (count, at, names) in enumerate(
        zip(num_logprobs.tolist(), positions.tolist(), named, strict=True)
    ):
        columns = [*range(count + 1)]
        if names:
            columns = [0, *range(1 + num_best, 1 + num_best + len(names))]
        packed.append(
            LogprobsArrays(
                first_position=at,
                width=len(columns),
                token_ids=ids[row, columns].astype("<i4").tobytes(),
                logprobs=values[row, columns].astype("<f4").tobytes(),
                ranks=found[2][row : row + 1].astype("<i4").tobytes(),
            )
        )
    return packed


def _columns(
    scores: torch.Tensor,
    at: torch.Tensor,
    token_ids: torch.Tensor,
    num_best: int,
    named: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raw = scores.index_select(0, at).float()
    chosen = token_ids.index_select(0, at)[:, None]
    columns = [chosen]
    if num_best:
        columns.append(token_ids_of(order_keys(raw).topk(num_best, dim=1).values))
    ids = torch.cat((*columns, named), dim=1)
    values = raw.log_softmax(dim=1).gather(1, ids)
    return ids.to(torch.int32), values, token_ranks(raw, chosen).to(torch.int32)


# Tokens of a step that stay on the device: the best ones, or filtered and drawn.
#
# Owns the order of work for rows that want a token and nothing else; what is drawn equals
# what the sampler of the host draws from the same logits.


@dataclass(frozen=True, slots=True)
class DeviceSamplingBatch:
    """Settings of N rows; as SamplingBatch has them."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]


def hardest_rows(count: int) -> DeviceSamplingBatch:
    """Rows that take the most memory: every filter, and a top-p over the whole vocabulary."""
    return DeviceSamplingBatch(
        np.ones(count, np.float32),
        np.zeros(count, np.int32),
        np.full(count, 0.5, np.float32),
        np.full(count, 0.1, np.float32),
        np.zeros(count, np.uint64),
        np.zeros(count, np.uint32),
        np.zeros(count, np.uint32),
    )


class DeviceSampling:
    """From logits on a device to tokens on it, without waiting."""

    def __init__(self, placement: Placement, draw: KeyedDraw) -> None:
        self._placement = placement
        self._draw = draw

    def tokens(self, logits: torch.Tensor, rows: DeviceSamplingBatch) -> torch.Tensor:
        """int64 [N] for logits [N, V] of any floating dtype, which stay as they are."""
        random = rows.temperature >= GREEDY_TEMPERATURE
        if not random.any():
            return logits.argmax(dim=1)
        filtering = random & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        some = filtering.nonzero()[0]
        sent = self._placement.send(
            [
                np.where(random, rows.temperature, np.float32(0)),
                rows.seed.view(np.int64),
                rows.choice.astype(np.int64),
                rows.position.astype(np.int64),
                some,
                rows.temperature[some],
                rows.top_k[some].astype(np.int64),
                rows.top_p[some].astype(np.float64),
                rows.min_p[some].astype(np.float64),
            ]
        )
        keys, (index, *filters) = sent[:4], sent[4:]
        wide = logits.float().contiguous()
        if len(some):
            plan = FilterPlan.of(
                rows.top_k[some], rows.top_p[some], rows.min_p[some], logits.shape[1]
            )
            kept = filter_on_device(wide.index_select(0, index), plan, *filters)
            wide = wide.index_copy(0, index, kept)
        return self._draw(wide, *keys)


Ids = npt.NDArray[np.int64]


class DeviceSampler:
    """Samples for the rows of one runner.

    last: int64 [rows], the last token of each row, on the device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        rows: InputBatch,
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

    def logprobs_of(self, at: Ids, handles: Sequence[int]) -> LogprobRequests:
        """What the rows `at` [N] with these handles want; before they get another token."""
        return logprob_requests(self._rows, at, handles)

    def sample(
        self,
        scores: torch.Tensor,
        at: Ids,
        handles: Sequence[int],
        grammars: GrammarOutput,
        logprobs: LogprobRequests,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Tokens int64 [N] for scores [N, V], which stay as they are; as `queue_logprobs` says.

        at: int64 [N], rows of the sequences, each with at most one token that is not known.
        """
        wishes = batch_logit_edits(self._rows, at, handles, grammars, self._vocab_size)
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
        self, scores: torch.Tensor, wishes: BatchLogitEdits, slots: Ids
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
        self, scores: torch.Tensor, token_ids: torch.Tensor, wanted: LogprobRequests
    ) -> list[torch.Tensor]:
        width = max(map(len, wanted.named))
        named = np.zeros((len(wanted.at), width), dtype=np.int64)
        for row, ids in enumerate(wanted.named):
            named[row, : len(ids)] = ids
        at, names = self._sent_logprobs.send([wanted.at, named])
        num_best = int(wanted.num_logprobs.max())
        return queue_logprobs(scores, at, token_ids, num_best, names.view(named.shape))

    def _drawn(self, at: Ids) -> DeviceSamplingBatch:
        rows = self._rows
        position = rows.num_tokens[at] - rows.num_prompt_tokens[at]
        return DeviceSamplingBatch(
            rows.temperature[at],
            rows.top_k[at],
            rows.top_p[at],
            rows.min_p[at],
            rows.seed[at],
            rows.choice[at],
            position.astype(np.uint32),
        )
