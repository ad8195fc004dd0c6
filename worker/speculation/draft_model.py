"""Drafts by a second, smaller model with the same tokenizer. Start at DraftModel.after_step.

    known tokens    t0 t1 … tm | x              x: the last one, sampled in this step
    passes over     everything up to x that has no KV here yet  ─▶ d0
    decode passes                               d0 ─▶ d1 ─▶ d2 …

Its KV cache has the block ids of the served model, those of a group that keeps all tokens, so that
it is shared and evicted with the prefixes there. The engine allocates nothing for it and only
estimates what is there (`DraftKVIndex`). What a block holds here follows from its content: beside
the KV of each token stands a hash of all tokens up to it, and KV is valid for a sequence if this is
the hash of its own tokens.

    block 7    K V  K V  K V  K V        block 7 is given to another sequence, which so far needs
    hashes     h3   h4   h5   0          no drafts: its hashes differ, and nothing is valid

That covers blocks that are reused, rejected drafts, preemption, KV that a connector loads for the
served model, and prompts, which are computed only if a draft is asked for.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from worker.attention.backend import AttentionBackend, AttentionInputs, QuerySplit, start_offsets
from worker.attention.kv_cache import KVCache
from worker.batch.input_batch import InputBatch, attention_inputs, dummy_inputs
from worker.batch.transfers import Transfers
from worker.models.decoder import Decoder
from worker.speculation.draft_sampler import DraftDraw, Drafts, OpenDraft, SampledStep
from worker.speculation.drafter import DraftedModel, Drafter

Hashes = NDArray[np.uint64]
PREFILL_PASSES: Final = 4
"""Most passes of a step in which a sequence that is alone in it computes tokens that its KV lacks:
the step ends later, and with it what an abort or a new request waits for. Beside other sequences
there is one."""
_ABSENT_TOKEN: Final = 0
"""Is read in place of a token that the draft model's vocabulary lacks."""


class DraftModel(Drafter):
    """A Drafter with a decoder of its own.

    kv_cache: of the draft model; all its groups use the same block table.
    prefill_tokens: most tokens of a sequence in a pass. Others: as of `Drafter`.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv_cache: KVCache,
        draw: DraftDraw,
        target: DraftedModel,
        transfers: Transfers,
        prefill_tokens: int,
    ) -> None:
        super().__init__(attention, kv_cache, draw, target, transfers)
        self._model = model
        self._prefill_tokens = prefill_tokens
        self._step_tokens = target.step_tokens
        self._contents = KVContents(target.batch, target.group, kv_cache.num_blocks)

    @torch.inference_mode()
    def warm_up(self) -> None:
        inputs = dummy_inputs(1, 1, self._batch.block_table)
        self._forward(inputs.token_ids, inputs.positions, inputs.attention[0], [0])

    def copy_blocks(self, sources: NDArray[np.int64], copies: NDArray[np.int64]) -> None:
        super().copy_blocks(sources, copies)
        self._contents.copy_blocks(sources, copies)

    @torch.inference_mode()
    def after_step(self, step: SampledStep) -> Drafts:
        """Return a draft for each sequence with lookahead, if its KV can be completed.

        A pass computes decodes first, then the sequences that miss the fewest tokens. A sequence
        whose KV is still incomplete continues in the next step and has no draft until then.
        """
        started = time.monotonic()
        made = Drafts()
        drafts = self._begin_drafts(step)
        unfinished = drafts
        most_passes = PREFILL_PASSES if len(step.seq_ids) == 1 else 1
        while unfinished:
            scheduled = self._schedule(unfinished)
            going_on = self._run_pass(scheduled, step.min_acceptance_prob)
            if len(made.pass_rows) + 1 < most_passes:
                going_on += [draft for draft in unfinished if draft.is_behind]
            unfinished = going_on
            started = made.add_pass(sum(draft.num_scheduled for draft in scheduled), started)
        for draft in drafts:
            if draft.num_computed > draft.num_valid:
                self._contents.record(draft.open_draft.row, draft.num_valid, draft.num_computed)
        self._sampler.end([draft.open_draft for draft in drafts])
        made.add_drafts([draft.open_draft for draft in drafts if not draft.is_behind])
        return made

    def _begin_drafts(self, step: SampledStep) -> list["_Draft"]:
        """Return an empty draft for each sequence with lookahead."""
        found = []
        for each in self._sampler.begin(step):
            num_valid = self._contents.num_valid(each.row, each.num_tokens)
            found.append(_Draft(each, num_valid=num_valid, num_computed=num_valid))
        return found

    def _schedule(self, drafts: Sequence["_Draft"]) -> list["_Draft"]:
        """Schedule tokens for the next pass; return the drafts that have some."""
        left = self._step_tokens
        ordered = sorted(drafts, key=lambda draft: draft.num_missing)
        for draft in ordered:
            most = left if draft.num_missing == 1 else min(left, self._prefill_tokens)
            draft.num_scheduled = min(draft.num_missing, most)
            left -= draft.num_scheduled
        # Attention on an accelerator takes decodes before chunks.
        ordered.sort(key=lambda draft: draft.num_scheduled > 1)
        return [draft for draft in ordered if draft.num_scheduled]

    def _run_pass(self, drafts: Sequence["_Draft"], min_acceptance_prob: float) -> list["_Draft"]:
        """Compute the scheduled tokens of drafts, whose KV follows what was computed before.

        Appends a token to each draft whose KV is complete then; returns those that go on.
        """
        counts = np.array([draft.num_scheduled for draft in drafts])
        first = np.array([draft.num_computed for draft in drafts])
        rows = np.array([draft.open_draft.row for draft in drafts]).repeat(counts)
        query_start = start_offsets(counts)
        positions = np.arange(query_start[-1], dtype=np.int64)
        positions += np.repeat(first - query_start[:-1], counts)
        token_ids = self._batch.token_ids[rows, positions].astype(np.int64)
        token_ids[token_ids >= self._model.spec.vocab_size] = _ABSENT_TOKEN
        split = query_start
        if self._attention.query_split is QuerySplit.ALL:
            split = np.arange(len(positions) + 1, dtype=np.int32)
        (inputs,) = attention_inputs(self._table, self._kv_cache.block_size, rows, positions, split)
        for draft in drafts:
            draft.num_computed += draft.num_scheduled
        complete = [index for index, draft in enumerate(drafts) if not draft.num_missing]
        last = [int(query_start[index + 1]) - 1 for index in complete]
        hidden = self._forward(token_ids, positions, inputs, last)
        if not complete:
            return []
        drafts = [drafts[index] for index in complete]
        open_drafts = [draft.open_draft for draft in drafts]
        going_on = self._sampler.extend(
            open_drafts, self._spread_logits(self._model.logits(hidden)), min_acceptance_prob
        )
        return [drafts[index] for index in going_on]

    def _forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        inputs: AttentionInputs,
        chosen: Sequence[int],
    ) -> torch.Tensor:
        """Compute tokens; return the hidden states [n, H] of n chosen ones.

        inputs: for every KV group of this model.
        """
        tokens, places, rows = self._transfers.to_device(
            [token_ids, positions, np.array(chosen, dtype=np.int64)]
        )
        groups = (inputs,) * len(self._kv_cache.layout.windows)
        return self._run_model(groups, tokens, places).index_select(0, rows)

    def _run_model(
        self, groups: Sequence[AttentionInputs], token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states [T, H] of a pass; they are valid until the next one."""
        self._attention.plan(groups)
        return self._model.forward(token_ids, positions, self._attention)


@dataclass(slots=True)
class _Draft:
    """The draft of a sequence in the step in which it is made.

    num_valid: leading positions whose KV was valid before. num_computed: whose KV is valid now.
    num_scheduled: tokens of the next pass.
    """

    open_draft: OpenDraft
    num_valid: int
    num_computed: int
    num_scheduled: int = 0

    @property
    def num_missing(self) -> int:
        """Tokens without KV, those of the draft included; at first at least the last known one."""
        return self.open_draft.last_position + 1 - self.num_computed

    @property
    def is_behind(self) -> bool:
        """Whether known tokens lack KV."""
        return self.num_computed < self.open_draft.num_tokens


class KVContents:
    """Which tokens the KV of each slot belongs to, by a hash of them, those before, and the salt.

    The hash is 64 bits and not cryptographic. Equal hashes of different tokens would lead to wrong
    drafts, which are not accepted.

    batch: whose block tables and tokens these are. group: KV group of the block tables.
    """

    def __init__(self, batch: InputBatch, group: int, num_blocks: int) -> None:
        table = batch.block_table
        self._batch = batch
        self._table = table.ids[group]
        self._block_size = table.block_size
        self._slots = np.zeros((num_blocks, table.block_size), dtype=np.uint64)
        """Hash of the tokens up to each slot's; 0: no KV. Behind a slot that was written last, no
        slot of its block has any, so the last slot of a block speaks for the whole block."""
        self._row_hashes = np.zeros(self._table.shape, dtype=np.uint64)
        """Hash of a row's tokens up to the end of each full block, uint64 [rows, blocks]."""
        self._num_hashed = np.zeros(len(self._table), dtype=np.int64)
        self._versions = np.zeros(len(self._table), dtype=np.int64)

    @staticmethod
    def bytes_needed(num_rows: int, max_model_len: int, block_size: int) -> int:
        """Return the bytes beside those of each token, which are TOKEN_BYTES."""
        return num_rows * (-(-max_model_len // block_size) * 8 + 16)

    def num_valid(self, row: int, num_tokens: int) -> int:
        """Return how many leading positions of a row have valid KV; the last token has none."""
        self._hash_full_blocks(row, num_tokens)
        size, num_full = self._block_size, num_tokens // self._block_size
        full = self._table[row, :num_full]
        block = _count_leading(self._slots[full, -1] == self._row_hashes[row, :num_full])
        first, end = block * size, min(num_tokens, (block + 1) * size)
        valid = first
        if first < end:
            slots = self._slots[self._table[row, block], : end - first]
            valid += _count_leading(slots == self._hashes(row, first, end))
        return min(valid, num_tokens - 1)

    def record(self, row: int, first: int, end: int) -> None:
        """Note that positions [first, end) of a row have valid KV, as all before them have."""
        block, offset = np.divmod(np.arange(first, end), self._block_size)
        blocks = self._table[row, block]
        self._slots[blocks, offset] = self._hashes(row, first, end)
        self._slots[blocks[-1], offset[-1] + 1 :] = 0

    def copy_blocks(self, sources: NDArray[np.int64], copies: NDArray[np.int64]) -> None:
        self._slots[copies] = self._slots[sources]

    def _hash_full_blocks(self, row: int, num_tokens: int) -> None:
        if self._versions[row] != self._batch.row_versions[row]:
            self._versions[row] = self._batch.row_versions[row]
            self._num_hashed[row] = 0
        size, start, end = self._block_size, self._num_hashed[row], num_tokens // self._block_size
        if start < end:
            hashes = self._hashes(row, start * size, end * size)
            self._row_hashes[row, start:end] = hashes[size - 1 :: size]
            self._num_hashed[row] = end

    def _hashes(self, row: int, first: int, end: int) -> Hashes:
        """Return the hash of the tokens up to each position in [first, end), drafts included.

        It is the sum of the salt's key and of a number for each token and its position: without
        the key, how soon drafts come would tell one client what another's block held before.
        Tokens and positions are mixed as in Steele, Lea, Flood:
        "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
        """
        block = min(first // self._block_size, int(self._num_hashed[row]))
        start = block * self._block_size
        mixed = np.arange(start + 1, end + 1, dtype=np.uint64) << np.uint64(32)  # 0 gives 0
        mixed |= self._batch.token_ids[row, start:end].astype(np.uint64)
        mixed *= _MIX[0]
        mixed ^= mixed >> np.uint64(30)
        mixed *= _MIX[1]
        mixed ^= mixed >> np.uint64(27)
        mixed *= _MIX[2]
        mixed ^= mixed >> np.uint64(31)
        if block:
            mixed[:1] += self._row_hashes[row, block - 1 : block]
        else:
            mixed[:1] += self._batch.extra_keys[row : row + 1]
        hashes: Hashes = mixed.cumsum()[first - start :]
        return hashes


TOKEN_BYTES: Final = 8
"""Bytes that KVContents keeps of a token."""
_MIX: Final = np.array(
    [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64
)


def _count_leading(valid: NDArray[np.bool_]) -> int:
    """Return how many elements are True before the first False."""
    return len(valid) if valid.all() else int(valid.argmin())
