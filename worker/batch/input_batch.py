"""What the worker remembers of each sequence between steps, and how a step's inputs are built.

A running sequence has a row in arrays that a step reads with one index operation. A preempted
sequence keeps its prompt and gives up its row; the engine sends its outputs and its block table
when it runs again. Rows never move. Start with `InputBatch.apply`, then `build_inputs`, which
counts the sampled positions of each row as `num_sampled_positions` does in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from proto.messages.multimodal import MultiModalFeature
from proto.messages.prepared_model import VisionFacts
from proto.messages.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from proto.messages.scheduler_output import BlockIds, NewRequestData, SchedulerOutput
from worker.attention.backend import AttentionInputs, QuerySplit, start_offsets
from worker.batch.step_inputs import (
    ImageRows,
    SampledPositions,
    StepInputs,
    TokenAdapters,
    sample_last_tokens,
)
from worker.sampling.logit_edits import RowEdits
from worker.sampling.logprobs import NO_LOGPROBS
from worker.sampling.row_params import RowParams, neutral_params, record_of


class BlockTable:
    """Block tables of all rows in all KV cache groups, as one array.

    `ids[group, row, i]` is the block with tokens [i * block_size, (i + 1) * block_size).
    ids: int32 [num_groups, num_rows, max_blocks]; entries past the end of a row have no meaning,
        and neither have blocks that the window of a group has passed.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.ids: NDArray[np.int32] = np.zeros(
            (num_groups, num_rows, -(-max_model_len // block_size)), dtype=np.int32
        )
        self._length = [[0] * num_groups for _ in range(num_rows)]

    def slots(self, group: int, row: int, first: int, end: int) -> NDArray[np.int64]:
        """Return the KV slots of positions [first, end) of a row, int64."""
        block, offset = np.divmod(np.arange(first, end), self.block_size)
        found: NDArray[np.int64] = self.ids[group, row, block] * np.int64(self.block_size) + offset
        return found

    def replace(self, row: int, block_ids: BlockIds) -> None:
        """Set the whole table of a row, one list for each group."""
        self._length[row] = [0] * self.num_groups
        self.append(row, block_ids)

    def append(self, row: int, block_ids: BlockIds) -> None:
        """Append blocks to the table of a row; one list, perhaps empty, for each group."""
        length = self._length[row]
        for group, (start, added) in enumerate(zip(length, block_ids, strict=True)):
            self.ids[group, row, start : start + len(added)] = added
            length[group] = start + len(added)


PENDING_TOKEN = -1
"""In token_ids: a token that was sampled on the device and has not reached the host yet."""
_OTHER_BYTES = 256
"""Most bytes of a row beside tokens and block tables: parameters, counts, free list."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """N tokens that were sampled on the device and have not reached the host yet.

    seq_ids: [N]. rows, indices: int64 [N], where the tokens stand in the batch. row_versions:
    int64 [N], those of the batch when the tokens were appended.
    """

    seq_ids: list[int]
    rows: NDArray[np.int64]
    indices: NDArray[np.int64]
    row_versions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt.

        prompt       | text | <m> <i> <i> <m> <i> <m> | <m> <i> <i> <m> | text |
        positions                  8   9      11              14  15
        first_rows                 0                           3           5

    positions: int64 [n], of the image tokens, each of which takes a row of encoder output.
    first_rows: for each image the index of its first position, then n.
    attend_end: int32 [num_prompt_tokens], as in AttentionInputs, where the tokens of an image see
        each other: adjacent ones of an image up to the last of them. None in other models.
    rotary_positions: int64 [3, end of the last image], of M-RoPE: of the frame, the row and the
        column of each token. Text after it has its position plus `rotary_shift`, three times. None
        in other models.

        an image of 2 x 3 rows of output      text   image               text
        frame                                 0  1   2  2  2  2  2  2    5  6
        row                                   0  1   2  2  2  3  3  3    5  6
        column                                0  1   2  3  4  2  3  4    5  6     a shift of -3
    """

    features: list[MultiModalFeature]
    positions: NDArray[np.int64]
    first_rows: list[int]
    attend_end: NDArray[np.int32] | None
    rotary_positions: NDArray[np.int64] | None = None
    rotary_shift: int = 0

    @classmethod
    def of(
        cls, prompt_token_ids: list[int], features: list[MultiModalFeature], vision: VisionFacts
    ) -> PromptImages:
        """Return the images of a prompt in which the front end has counted the image tokens."""
        is_image = np.array(prompt_token_ids) == vision.image_token_id
        found = [
            feature.offset + is_image[feature.offset : feature.end].nonzero()[0]
            for feature in features
        ]
        assert [len(each) for each in found] == [each.num_embeds for each in features]
        positions = np.concatenate(found)
        first_rows = np.cumsum([0, *map(len, found)]).tolist()
        attend_end = None
        if vision.is_bidirectional:
            attend_end = np.arange(1, len(prompt_token_ids) + 1, dtype=np.int32)
            is_last = np.append(np.diff(positions) > 1, [True])
            is_last[np.array(first_rows[1:]) - 1] = True
            last = is_last.nonzero()[0]
            run = np.searchsorted(last, np.arange(len(positions)))
            attend_end[positions] = positions[last[run]] + 1
        if not vision.mrope_merge:
            return cls(features, positions, first_rows, attend_end)
        rotary = np.arange(features[-1].end).repeat(3).reshape(-1, 3).T.copy()
        shift = 0
        for feature, own in zip(features, found, strict=True):
            _, height, width = feature.grid
            height, width = height // vision.mrope_merge, width // vision.mrope_merge
            assert height * width == len(own), "an image has one frame"
            first = feature.offset + shift
            rotary[:, feature.offset : feature.end] = first
            rotary[1, own] += np.arange(height).repeat(width)
            rotary[2, own] += np.tile(np.arange(width), height)
            shift += max(height, width) - len(own)
            rotary[:, feature.end :] = np.arange(feature.end, rotary.shape[1]) + shift
        return cls(features, positions, first_rows, attend_end, rotary, shift)

    def rotary_positions_at(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the rotary positions [3, n] of the tokens at [first, end), of M-RoPE."""
        assert self.rotary_positions is not None
        given = self.rotary_positions[:, first:end]
        after = np.arange(first + given.shape[1], end) + self.rotary_shift
        return np.concatenate((given, np.broadcast_to(after, (3, len(after)))), axis=1)

    def rows_of_step(self, first: int, end: int) -> list[ImageRows]:
        """Return what the tokens at [first, end) of the prompt take, in order."""
        begin, stop = np.searchsorted(self.positions, [first, end]).tolist()
        taken: list[ImageRows] = []
        if begin == stop:
            return taken
        for index, feature in enumerate(self.features):
            from_row = max(begin, self.first_rows[index])
            to_row = min(stop, self.first_rows[index + 1])
            positions = self.positions[from_row:to_row]
            starts = [0, *(np.flatnonzero(np.diff(positions) > 1) + 1).tolist(), len(positions)]
            for start, after in pairwise(starts):
                if start < after:
                    row = from_row + start - self.first_rows[index]
                    rows = slice(row, row + after - start)
                    taken.append(ImageRows(int(positions[start]) - first, feature.mm_hash, rows))
        return taken


@dataclass(frozen=True, slots=True)
class RowState:
    """The properties of a sequence that never change."""

    seq_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    choice: int
    extra_key: int
    prompt_embeds: NDArray[np.float32] | None
    lora_int_id: int
    lora_scale: float
    images: PromptImages | None


class InputBatch:
    """The sequences that a worker knows. Arrays are indexed by row, [num_rows] unless said.

    token_ids: int32 [num_rows, max_model_len + 1], prompt then outputs.
    num_tokens, num_prompt_tokens: int32.
    row_params: records of ROW_PARAMS, `position` left at 0.
    num_logprobs: int32, alternatives beside the sampled token, or NO_LOGPROBS.
    num_candidates: int32, best next tokens that a beam reports instead of sampling; else 0.
    min_output: int32, min_tokens.
    num_prompt_logprobs: int32, alternatives beside each prompt token, or NO_LOGPROBS.
    greedy: bool, rows that need only their best token after logit edits.
    edits: row → logit edits, for rows that have some.
    row_versions: int64, counts how often the known tokens of the row were replaced; between two
        replacements tokens are only appended.
    prompt_embeds: row → float32 [num_prompt_tokens, hidden], for prompts given as embeddings.
    images: row → images of the prompt, for rows that have some.
    extra_keys: uint64, of what besides the tokens decides the KV; 0 for nothing.
    lora_ids, lora_scales: int64 and float32, the adapter of the row, 0 for none, and the factor of
        its effect. has_adapters: whether a sequence has had one.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
        *,
        has_states: bool = False,
        vision: VisionFacts | None = None,
    ) -> None:
        self.has_states = has_states
        self._vision = vision
        self.block_table = BlockTable(num_rows, max_model_len, block_size, num_groups)
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int32)
        self.row_params = neutral_params(num_rows)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int32)
        self.num_candidates = np.zeros(num_rows, dtype=np.int32)
        self.min_output = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int32)
        self.greedy = np.zeros(num_rows, dtype=np.bool_)
        self.edits: dict[int, RowEdits] = {}
        self.row_versions = np.zeros(num_rows, dtype=np.int64)
        self.extra_keys = np.zeros(num_rows, dtype=np.uint64)
        self.prompt_embeds: dict[int, NDArray[np.float32]] = {}
        self.images: dict[int, PromptImages] = {}
        self.lora_ids = np.zeros(num_rows, dtype=np.int64)
        self.lora_scales = np.ones(num_rows, dtype=np.float32)
        self.has_adapters = False
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[int, int] = {}
        self._sequences: dict[int, RowState] = {}

    @staticmethod
    def bytes_needed(num_rows: int, max_model_len: int, block_size: int, num_groups: int) -> int:
        """Return the most bytes that a batch takes, with all rows at full length.

        Logit edits of rows are not included.
        """
        num_blocks = num_groups * -(-max_model_len // block_size)
        return num_rows * (4 * (max_model_len + 1 + num_blocks) + _OTHER_BYTES)

    def apply(self, step: SchedulerOutput) -> NDArray[np.int64]:
        """Apply the scheduler's changes; return the rows of the step, int64 [S].

        The order is that of the step: new requests, then cached ones.
        """
        for seq_id in step.finished_seq_ids:
            self._remove_sequence(seq_id)
        for seq_id in step.preempted_seq_ids:
            self._release_row(seq_id)
        for new in step.new_requests:
            self._add_sequence(new)
        cached = step.cached_requests
        resumed = dict(zip(cached.resumed_seq_ids, cached.resumed_output_token_ids, strict=True))
        for seq_id, block_ids in zip(cached.seq_ids, cached.new_block_ids, strict=True):
            if seq_id in resumed:
                self._fill_row(self._sequences[seq_id], resumed[seq_id])
                assert block_ids is not None, "a resumed sequence brings its block table"
                self.block_table.replace(self._row_of[seq_id], block_ids)
            elif block_ids is not None:
                self.block_table.append(self._row_of[seq_id], block_ids)
        for seq_id, token_id in zip(cached.forced_seq_ids, cached.forced_token_ids, strict=True):
            self.append_sampled(np.array([self._row_of[seq_id]]), np.array([token_id]))
        for seq_id, draft in step.drafts.items():
            row = self._row_of[seq_id]
            first = self.num_tokens[row]  # the draft does not count before it is verified
            self.token_ids[row, first : first + len(draft)] = draft
        seq_ids = [new.seq_id for new in step.new_requests] + cached.seq_ids
        return np.fromiter(map(self._row_of.__getitem__, seq_ids), np.int64, len(seq_ids))

    def sampled_positions(self, inputs: StepInputs, seq_ids: Sequence[int]) -> SampledPositions:
        """Return the sampled positions of a step. seq_ids: [S], of the sequences of `inputs`."""
        sequences = inputs.sampled_sequences()
        rows = inputs.rows[sequences]
        ends = inputs.positions[inputs.sample_tokens] + 1
        drafts: dict[int, tuple[int, ...]] = {}
        for index in np.flatnonzero(ends > self.num_tokens[rows]).tolist():
            end, num_drafts = (
                inputs.sample_tokens[index] + 1,
                ends[index] - self.num_tokens[rows[index]],
            )
            drafts[index] = tuple(inputs.token_ids[end - num_drafts : end].tolist())
        return SampledPositions(
            sequences,
            rows,
            [seq_ids[sequence] for sequence in sequences.tolist()],
            (ends - self.num_prompt_tokens[rows]).astype(np.int32),
            drafts,
        )

    def append_sampled(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Append tokens to rows, both [n]. Several tokens of a row stand side by side."""
        index = self.num_tokens[rows]
        follows = rows[1:] == rows[:-1]
        if follows.any():
            number, is_first = np.arange(len(rows)), np.append([True], ~follows)
            index += (number - np.maximum.accumulate(np.where(is_first, number, 0))).astype(
                np.int32
            )
        self.token_ids[rows, index] = token_ids
        self.num_tokens[rows] = index + 1  # of equal rows the last one counts
        if self.edits:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in self.edits and token_id != PENDING_TOKEN:
                    self.edits[row].append(token_id)

    def append_pending(self, positions: SampledPositions) -> PendingTokens:
        """Append PENDING_TOKEN for each sampled position, until `resolve_pending`.

        A row with a draft is in no other step before its tokens are resolved.
        """
        rows = positions.rows
        self.append_sampled(rows, np.full(len(rows), PENDING_TOKEN))
        indices = positions.output_index.astype(np.int64) + self.num_prompt_tokens[rows]
        return PendingTokens(positions.seq_ids, rows, indices, self.row_versions[rows])

    def resolve_pending(
        self,
        pending: PendingTokens,
        token_ids: NDArray[np.int64],
        accepted: NDArray[np.bool_] | None = None,
    ) -> None:
        """Replace PENDING_TOKEN by the sampled tokens, where a row still has the tokens that it
        had.

        It has others if it belongs to another sequence now, or was sent again: after a preemption,
        or because the step was in vain. token_ids: int64 [N]. accepted: bool [N], the positions
        whose tokens count; the others are taken back.
        """
        is_current = self.holds(pending.seq_ids, pending.rows, pending.row_versions)
        for number in is_current.nonzero()[0].tolist():
            row, index = int(pending.rows[number]), int(pending.indices[number])
            self.token_ids[row, index] = token_ids[number]
            if accepted is not None and not accepted[number]:
                self.num_tokens[row] = min(int(self.num_tokens[row]), index)
            elif row in self.edits:
                self.edits[row].append(int(token_ids[number]))

    def num_known(self, row: int) -> int:
        """Return how many tokens of a row the host knows; at most one is pending."""
        return int(self.num_tokens[row]) - self.last_is_pending(row)

    def holds(
        self,
        seq_ids: Sequence[int],
        rows: NDArray[np.int64],
        row_versions: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Return which sequences are still in their rows, bool [n], as they were when noted.

        row_versions: int64 [n], noted then.
        """
        pairs = zip(seq_ids, rows.tolist(), strict=True)
        found = np.array([self._row_of.get(each) == row for each, row in pairs], dtype=np.bool_)
        same: NDArray[np.bool_] = found & (self.row_versions[rows] == row_versions)
        return same

    def last_is_pending(self, row: int) -> bool:
        return bool(self.token_ids[row, self.num_tokens[row] - 1] == PENDING_TOKEN)

    def drafts_need_tokens(self, step: SchedulerOutput) -> bool:
        """Return whether edits of a row with a draft depend on a token that is pending.

        The edits of the tokens after a draft are made on the host, out of all tokens before them.
        """
        return any(
            (row := self._row_of[seq_id]) in self.edits and self.last_is_pending(row)
            for seq_id in step.spec_decode_seq_ids
        )

    def need_host(
        self, rows: NDArray[np.int64], num_computed: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return the rows, bool [n], with results that can only be computed on the host.

        These are candidates of a beam, and log-probabilities of prompt tokens that follow the
        first token of the step. num_computed: int32 [n], tokens computed before the step.
        """
        prompts = (self.num_prompt_logprobs[rows] != NO_LOGPROBS) & (
            num_computed + 1 < self.num_prompt_tokens[rows]
        )
        needed: NDArray[np.bool_] = prompts | (self.num_candidates[rows] > 0)
        return needed

    def params_of(self, positions: SampledPositions) -> RowParams:
        """Return the sampling parameters [N] of sampled positions, keyed by output index."""
        params = self.row_params[positions.rows]
        params["position"] = positions.output_index
        return params

    def before_min_tokens(self, positions: SampledPositions) -> NDArray[np.bool_]:
        """Return the sampled positions where stop tokens are still forbidden, bool [N]."""
        early: NDArray[np.bool_] = positions.output_index < self.min_output[positions.rows]
        return early

    def edits_of(self, positions: SampledPositions) -> list[tuple[int, RowEdits]]:
        """Return (index, logit edits) of the sampled positions whose rows have edits.

        Each position has the edits that follow from all tokens before it.
        """
        if not self.edits:
            return []
        return [
            (index, self._edits_after(positions, index))
            for index, row in enumerate(positions.rows.tolist())
            if row in self.edits
        ]

    def _edits_after(self, positions: SampledPositions, index: int) -> RowEdits:
        row = int(positions.rows[index])
        if index not in positions.drafts:
            return self.edits[row]
        assert not self.last_is_pending(row), "drafts follow tokens that the host knows"
        return self.edits[row].after(positions.drafts[index])

    def params(self, seq_id: int) -> SamplingParams:
        return self._sequences[seq_id].params

    def clear(self) -> None:
        for seq_id in list(self._sequences):
            self._remove_sequence(seq_id)

    def _add_sequence(self, new: NewRequestData) -> None:
        sequence = RowState(
            seq_id=new.seq_id,
            prompt_token_ids=new.prompt_token_ids,
            params=new.sampling_params,
            seed=new.seed,
            choice=new.choice,
            extra_key=new.extra_key,
            prompt_embeds=_rows_of(new),
            lora_int_id=new.lora_int_id,
            lora_scale=new.lora_scale,
            images=self._images_of(new),
        )
        self._sequences[new.seq_id] = sequence
        self._fill_row(sequence, new.output_token_ids)
        self.block_table.replace(self._row_of[new.seq_id], new.block_ids)

    def _images_of(self, new: NewRequestData) -> PromptImages | None:
        if not new.mm_features:
            return None
        assert self._vision is not None, "the model reads no images"
        return PromptImages.of(new.prompt_token_ids, new.mm_features, self._vision)

    def _fill_row(self, sequence: RowState, output_token_ids: list[int]) -> None:
        """Write a sequence into its row, or into a free one if it has none."""
        if sequence.seq_id not in self._row_of:
            self._row_of[sequence.seq_id] = self._free.pop()
        row = self._row_of[sequence.seq_id]
        prompt_end = len(sequence.prompt_token_ids)
        end = prompt_end + len(output_token_ids)
        self.row_versions[row] += 1
        self.token_ids[row, :prompt_end] = sequence.prompt_token_ids
        self.token_ids[row, prompt_end:end] = output_token_ids
        self.num_prompt_tokens[row] = prompt_end
        self.num_tokens[row] = end
        self.extra_keys[row] = sequence.extra_key
        self.lora_ids[row] = sequence.lora_int_id
        self.lora_scales[row] = sequence.lora_scale
        self.has_adapters |= sequence.lora_int_id > 0
        params = sequence.params
        self.row_params[row] = record_of(params, sequence.seed, sequence.choice)
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.num_candidates[row] = params.num_candidates
        self.min_output[row] = params.min_tokens
        self.num_prompt_logprobs[row] = (
            NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        )
        self.greedy[row] = (
            params.temperature < GREEDY_TEMPERATURE
            and params.logprobs is None
            and params.num_candidates == 0
        )
        self._drop_extras(row)
        prompt = sequence.prompt_token_ids
        if sequence.images is not None:
            self.images[row] = sequence.images
        if sequence.prompt_embeds is not None:
            self.prompt_embeds[row] = sequence.prompt_embeds
            prompt = []
        if params.edits is not None:
            self.edits[row] = RowEdits(params.edits, prompt, output_token_ids)

    def _release_row(self, seq_id: int) -> None:
        row = self._row_of.pop(seq_id)
        self._drop_extras(row)
        self._free.append(row)

    def _drop_extras(self, row: int) -> None:
        """Forget what only some rows have."""
        self.edits.pop(row, None)
        self.prompt_embeds.pop(row, None)
        self.images.pop(row, None)

    def _remove_sequence(self, seq_id: int) -> None:
        if seq_id in self._row_of:
            self._release_row(seq_id)
        self._sequences.pop(seq_id, None)


def _rows_of(new: NewRequestData) -> NDArray[np.float32] | None:
    """Return a prompt's embeddings [num_prompt_tokens, hidden]; None for a prompt of tokens."""
    if not new.prompt_embeds:
        return None
    return np.frombuffer(new.prompt_embeds, "<f4").reshape(len(new.prompt_token_ids), -1).copy()


def build_inputs(
    step: SchedulerOutput,
    step_rows: NDArray[np.int64],
    batch: InputBatch,
    order: NDArray[np.int64] | slice = slice(None),
    *,
    query_split: QuerySplit = QuerySplit.NONE,
) -> StepInputs:
    """Return the inputs of a step that `batch` has applied.

    step_rows: from `InputBatch.apply`. order: index of the step's sequence at each place of the
    inputs. query_split: of the attention backend.
    """
    new, cached = step.new_requests, step.cached_requests
    step_rows = step_rows[order]
    num_computed = np.array(
        [request.num_computed_tokens for request in new] + cached.num_computed_tokens,
        dtype=np.int32,
    )[order]
    num_scheduled = np.array(
        [request.num_scheduled_tokens for request in new] + cached.num_scheduled_tokens,
        dtype=np.int32,
    )[order]
    query_start = start_offsets(num_scheduled)
    seq_lens = num_computed + num_scheduled

    positions = np.arange(query_start[-1], dtype=np.int64)
    positions += np.repeat(num_computed - query_start[:-1], num_scheduled)
    token_rows = np.repeat(step_rows, num_scheduled)
    # A sequence is sampled from its last known token on.
    num_sampled = np.maximum(seq_lens + 1 - batch.num_tokens[step_rows], 0)
    sample_start, sample_tokens = sample_last_tokens(query_start, num_sampled)
    table = batch.block_table
    attention = attention_inputs(
        table.ids,
        table.block_size,
        token_rows,
        positions,
        _split_queries(query_start, num_sampled, query_split),
    )
    if batch.has_states:  # a sequence with a draft is one sequence there
        (states,) = attention_inputs(
            table.ids[-1:], table.block_size, token_rows, positions, query_start
        )
        num_drafts = np.maximum(num_sampled - 1, 0)
        attention = (*attention[:-1], replace(states, num_drafts=num_drafts))
    if batch.images:
        attend_end = _step_attend_end(batch, step_rows, query_start, num_computed, positions)
        if attend_end is not None:
            attention = tuple(replace(group, attend_end=attend_end) for group in attention)
    return StepInputs(
        token_ids=batch.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        rows=step_rows,
        query_start=query_start,
        seq_lens=seq_lens,
        num_computed=num_computed,
        sample_start=sample_start,
        sample_tokens=sample_tokens,
        attention=attention,
        embeddings=(
            _step_embeddings(batch, step_rows, query_start, num_computed, seq_lens)
            if batch.prompt_embeds
            else ()
        ),
        adapters=(_step_adapters(batch, step_rows, num_scheduled) if batch.has_adapters else None),
        images=(
            _step_images(batch, step_rows, query_start, num_computed, seq_lens)
            if batch.images
            else ()
        ),
        rotary_positions=(
            _step_rotary_positions(batch, step_rows, query_start, num_computed, positions)
            if batch.images
            else None
        ),
    )


def _step_rotary_positions(
    batch: InputBatch,
    rows: NDArray[np.int64],
    query_start: NDArray[np.int32],
    num_computed: NDArray[np.int32],
    positions: NDArray[np.int64],
) -> NDArray[np.int64] | None:
    """Return `StepInputs.rotary_positions`. The arguments are as there."""
    found: NDArray[np.int64] | None = None
    for index, row in enumerate(rows.tolist()):
        if row not in batch.images or batch.images[row].rotary_positions is None:
            continue
        if found is None:
            found = np.tile(positions, (3, 1))
        begin, end = int(query_start[index]), int(query_start[index + 1])
        first = int(num_computed[index])
        own = batch.images[row].rotary_positions_at(first, first + end - begin)
        found[:, begin:end] = own
    if found is not None and (found == found[0]).all():
        (found, *_) = found
    return found


def _step_images(
    batch: InputBatch,
    rows: NDArray[np.int64],
    query_start: NDArray[np.int32],
    num_computed: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
) -> tuple[ImageRows, ...]:
    """Return `StepInputs.images`. The arguments are as there."""
    return tuple(
        replace(taken, first_token=int(query_start[index]) + taken.first_token)
        for index, row in enumerate(rows.tolist())
        if row in batch.images
        for taken in batch.images[row].rows_of_step(int(num_computed[index]), int(seq_lens[index]))
    )


def _step_attend_end(
    batch: InputBatch,
    rows: NDArray[np.int64],
    query_start: NDArray[np.int32],
    num_computed: NDArray[np.int32],
    positions: NDArray[np.int64],
) -> NDArray[np.int32] | None:
    """Return `AttentionInputs.attend_end` [T]; None if each token sees none after its own.

    positions: int64 [T]. The other arguments are as in StepInputs.
    """
    found = (positions + 1).astype(np.int32)
    sees_later = False
    for index, row in enumerate(rows.tolist()):
        if row not in batch.images or (ends := batch.images[row].attend_end) is None:
            continue
        begin, end = int(query_start[index]), int(query_start[index + 1])
        own = ends[num_computed[index] : num_computed[index] + end - begin]
        tokens = slice(begin, begin + len(own))
        if (own > found[tokens]).any():
            assert own[-1] <= num_computed[index] + end - begin, "a step ends inside an image"
            found[tokens] = own
            sees_later = True
    return found if sees_later else None


def _step_adapters(
    batch: InputBatch, rows: NDArray[np.int64], num_scheduled: NDArray[np.int32]
) -> TokenAdapters | None:
    """Return `StepInputs.adapters`. num_scheduled: tokens of each row."""
    ids = batch.lora_ids[rows]
    if not ids.any():
        return None
    scales = batch.lora_scales[rows]
    return TokenAdapters(np.repeat(ids, num_scheduled), np.repeat(scales, num_scheduled))


def _step_embeddings(
    batch: InputBatch,
    rows: NDArray[np.int64],
    query_start: NDArray[np.int32],
    num_computed: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
) -> tuple[tuple[int, NDArray[np.float32]], ...]:
    """Return `StepInputs.embeddings`. The arguments are as there."""
    return tuple(
        (int(query_start[index]), batch.prompt_embeds[row][num_computed[index] : seq_lens[index]])
        for index, row in enumerate(rows.tolist())
        if row in batch.prompt_embeds and num_computed[index] < len(batch.prompt_embeds[row])
    )


def dummy_inputs(
    num_tokens: int,
    num_seqs: int,
    table: BlockTable,
    query_split: QuerySplit = QuerySplit.NONE,
    *,
    has_states: bool = False,
) -> StepInputs:
    """Return a step of dummy sequences of token 0, all in block 0, the null block.

    Each sequence begins in this step, with at most as many tokens as a row of the table has.
    query_split: of the attention backend; with ALL, block tables are as wide as they can be, since
    each token has one. has_states: the last group is that of states, which is not split.
    """
    counts = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int32)
    counts[: num_tokens % num_seqs] += 1
    assert 0 < counts.min() <= counts.max() <= table.ids.shape[2] * table.block_size
    query_start = start_offsets(counts)
    positions = np.arange(num_tokens) - np.repeat(query_start[:-1], counts)
    blocks = np.zeros((num_seqs, -(-int(counts.max()) // table.block_size)), dtype=np.int32)
    attention = AttentionInputs(query_start, counts, blocks, positions % table.block_size)
    states = (attention,) if has_states else ()
    if query_split is QuerySplit.ALL:
        attention = AttentionInputs(
            np.arange(num_tokens + 1, dtype=np.int32),
            (positions + 1).astype(np.int32),
            np.zeros((num_tokens, table.ids.shape[2]), dtype=np.int32),
            attention.slot_mapping,
        )
    sample_start, sample_tokens = sample_last_tokens(query_start, np.ones_like(counts))
    return StepInputs(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        rows=np.zeros(num_seqs, dtype=np.int64),
        query_start=query_start,
        seq_lens=counts,
        num_computed=np.zeros_like(counts),
        sample_start=sample_start,
        sample_tokens=sample_tokens,
        attention=(attention,) * (table.num_groups - len(states)) + states,
    )


def _split_queries(
    query_start: NDArray[np.int32], num_sampled: NDArray[np.int32], split: QuerySplit
) -> NDArray[np.int32]:
    """Return where the sequences begin that attention sees, int32 [number of those + 1]."""
    if split is QuerySplit.ALL:
        return np.arange(query_start[-1] + 1, dtype=np.int32)
    if split is QuerySplit.NONE or num_sampled.max(initial=0) <= 1:
        return query_start
    counts = np.diff(query_start)
    is_split = num_sampled > 1
    assert (num_sampled[is_split] == counts[is_split]).all(), "a draft follows one token"
    return start_offsets(np.repeat(np.where(is_split, 1, counts), np.where(is_split, counts, 1)))


def attention_inputs(
    tables: NDArray[np.int32],
    block_size: int,
    token_rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    query_start: NDArray[np.int32],
) -> tuple[AttentionInputs, ...]:
    """Return the block tables of the step's sequences and the slots of its tokens, by group.

    tables: block tables of all rows, int32 [groups, num_rows, max_blocks]. token_rows, positions:
    int64 [T], of the tokens. query_start: of the sequences as attention sees them; every one has
    tokens.
    """
    last_tokens = query_start[1:] - 1
    seq_lens = (positions[last_tokens] + 1).astype(np.int32)
    block_index, offset = np.divmod(positions, block_size)
    max_blocks = -(-int(seq_lens.max()) // block_size)
    of_sequences = np.ascontiguousarray(tables[:, token_rows[last_tokens], :max_blocks])
    slots = tables[:, token_rows, block_index].astype(np.int64) * block_size + offset
    return tuple(
        AttentionInputs(query_start, seq_lens, block_table, slot_mapping)
        for block_table, slot_mapping in zip(of_sequences, np.ascontiguousarray(slots), strict=True)
    )
