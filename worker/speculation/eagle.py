"""Drafts by a head of EAGLE or EAGLE-3 (eagle_head.py). Start at EagleDrafter.after_step.

    position            0    1    2    3    4
    tokens              t0   t1   t2 | t3 | x          x: sampled in this step, behind t3
    target's states     h0   h1   h2 | h3 |
    the head reads      t1   t2   t3 | x  |            at position 3: h3 and x ─▶ d0
                        h0   h1   h2 | h3 |            at position 4: its own state and d0 ─▶ d1

After every step the head writes K and V of all positions whose next token is known, prompts
included, into its own KV cache. That has the block ids of the target's, those of a group that keeps
all tokens, so a prefix that is found in the cache has the head's KV, too, but for its last block
(`engine_core/kv_cache/manager.py:KVCacheManager`). Positions whose results are not needed cost two
products and no attention.

KV of the head may be stale: in blocks that a connector loaded, behind a token that a beam chose,
and at the end of a block after which two sequences went on with different tokens: of equal blocks
the prefix cache keeps one. That costs acceptance, never a token of an answer.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from worker.attention.backend import AttentionBackend
from worker.attention.kv_cache import KVCache
from worker.batch.input_batch import attention_inputs, dummy_inputs
from worker.batch.transfers import Transfers
from worker.speculation.draft_sampler import DraftDraw, Drafts, OpenDraft, SampledStep
from worker.speculation.drafter import DraftedModel, Drafter
from worker.speculation.eagle_head import EagleHead


class EagleDrafter(Drafter):
    """A Drafter with a head. Parameters as of `Drafter`; attention and kv_cache are the head's."""

    def __init__(
        self,
        head: EagleHead,
        attention: AttentionBackend,
        kv_cache: KVCache,
        draw: DraftDraw,
        target: DraftedModel,
        transfers: Transfers,
    ) -> None:
        super().__init__(attention, kv_cache, draw, target, transfers)
        self._head = head
        self._group = target.group

    def keep_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.features(hidden)

    @torch.inference_mode()
    def warm_up(self) -> None:
        inputs = dummy_inputs(1, 1, self._batch.block_table)
        self._attention.plan(inputs.attention[:1])
        (tokens,) = self._transfers.to_device([inputs.token_ids])
        features = tokens.new_zeros((1, self._head.spec.hidden_size), dtype=self._head.dtype)
        states = self._head.forward(tokens, features, tokens, self._attention)
        self._head.logits(states)

    @torch.inference_mode()
    def after_step(self, step: SampledStep) -> Drafts:
        """Return a draft for each sequence with lookahead.

        Storing K and V, which is no pass of the drafts, happens in every step.
        """
        made = Drafts()
        inputs, batch = step.inputs, self._batch
        counts = np.diff(inputs.query_start)
        rows = inputs.rows.repeat(counts)
        is_known = inputs.positions + 1 < step.num_tokens.repeat(counts)
        tokens = np.flatnonzero(is_known)
        if not len(tokens):
            return made
        drafts = self._sampler.begin(step)
        # The head's last position is that of the last but one token; tokens before it were sampled.
        last = self._tokens_before(step, drafts)
        assert step.states is not None
        next_ids = batch.token_ids[rows[tokens], inputs.positions[tokens] + 1].astype(np.int64)
        is_last = np.isin(tokens, last)
        stored = np.flatnonzero(~is_last)
        if len(stored):
            slots = inputs.attention[self._group].slot_mapping[tokens[stored]]
            ids, rows_of, positions, places = self._transfers.to_device(
                [next_ids[stored], tokens[stored], inputs.positions[tokens[stored]], slots]
            )
            features = step.states.index_select(0, rows_of)
            self._head.store(ids, features, positions, self._kv_cache, places)
        if not drafts:
            return made
        chosen = last
        features = step.states
        started = time.monotonic()
        going_on = drafts
        while going_on:
            states = self._run_pass(going_on, features, chosen)
            logits = self._spread_logits(self._head.logits(states), self._head.tokens)
            indices = self._sampler.extend(going_on, logits, step.min_acceptance_prob)
            started = made.add_pass(len(going_on), started)
            going_on = [going_on[index] for index in indices]
            features, chosen = states, np.array(indices, dtype=np.int64)
        self._sampler.end(drafts)
        made.add_drafts(drafts)
        return made

    def _tokens_before(self, step: SampledStep, drafts: Sequence[OpenDraft]) -> NDArray[np.int64]:
        """Return the index in the step of the last but one known token of each draft's sequence."""
        inputs = step.inputs
        found = [
            inputs.query_start[draft.sequence]
            + draft.num_tokens
            - 2
            - inputs.num_computed[draft.sequence]
            for draft in drafts
        ]
        return np.array(found, dtype=np.int64)

    def _run_pass(
        self, drafts: Sequence[OpenDraft], features: torch.Tensor, chosen: NDArray[np.int64]
    ) -> torch.Tensor:
        """Return the head's states [D, H] at the position before each draft's last token.

        chosen: int64 [D], the rows of `features` that the head reads there.
        """
        rows = np.array([draft.row for draft in drafts])
        positions = np.array([draft.last_position for draft in drafts], dtype=np.int64)
        token_ids = self._batch.token_ids[rows, positions].astype(np.int64)
        positions -= 1
        query_start = np.arange(len(drafts) + 1, dtype=np.int32)
        self._attention.plan(
            attention_inputs(self._table, self._kv_cache.block_size, rows, positions, query_start)
        )
        ids, rows_of, places = self._transfers.to_device([token_ids, chosen, positions])
        return self._head.forward(ids, features.index_select(0, rows_of), places, self._attention)
