"""The interface of models that propose drafts, and what the runner passes to them after a step.

    step N     forward ─▶ keep_states ─▶ sample ─▶ after_step ─▶ ModelRunnerOutput with drafts
    step N+1   the engine schedules what it takes of them; the model verifies it (step_inputs.py)

A draft follows the tokens of its step, so it is proposed when they are known on the host. On a GPU
that is when the step's answer is collected, and the next step may be queued already:

    host     launch N │ launch N+1 │ tokens of N ─▶ after_step(N): launch, wait, … ─▶ answer of N
    device   [ step N ][ step N+1 ]                 [ pass ] [ pass ]

All ranks of a model make the same drafts, because they compute the same numbers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker.attention.backend import AttentionBackend
from worker.attention.kv_cache import KVCache
from worker.batch.input_batch import InputBatch
from worker.batch.transfers import Transfers
from worker.speculation.draft_sampler import DraftDraw, Drafts, DraftSampler, SampledStep


@dataclass(frozen=True, slots=True)
class DraftedModel:
    """What a drafter needs of the model that it drafts for.

    batch: of that model. group: KV group of its block tables that keeps all tokens. step_tokens:
    most tokens of a pass. max_model_len: tokens that a sequence may have with its draft.
    """

    batch: InputBatch
    group: int
    vocab_size: int
    step_tokens: int
    max_model_len: int


class Drafter(ABC):
    """Proposes tokens after each step of one engine.

    kv_cache: of its own, with the block ids of `target.group`, so that it is shared and evicted
        with the prefixes there. draw, transfers: of the device where it runs.
    """

    def __init__(
        self,
        attention: AttentionBackend,
        kv_cache: KVCache,
        draw: DraftDraw,
        target: DraftedModel,
        transfers: Transfers,
    ) -> None:
        self._attention = attention
        self._kv_cache = kv_cache
        self._batch = target.batch
        self._table = target.batch.block_table.ids[target.group : target.group + 1]
        self._vocab_size = target.vocab_size
        self._sampler = DraftSampler(target.batch, draw, target.max_model_len)
        self._transfers = transfers

    @abstractmethod
    def warm_up(self) -> None:
        """Run each kernel once, in block 0, because first calls are slow."""

    def copy_blocks(self, sources: NDArray[np.int64], copies: NDArray[np.int64]) -> None:
        """Copy what is kept for block sources[i] to block copies[i]; called before a step runs.

        sources, copies: int64 [n]; no block is in both.
        """
        self._kv_cache.copy_blocks(*self._transfers.to_device([sources, copies]))

    def keep_states(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return what the drafter reads of a step's states, in new memory; called right behind it.

        hidden: [T, H], before the last norm. None for a drafter that reads none.
        """
        return None

    @abstractmethod
    def after_step(self, step: SampledStep) -> Drafts:
        """Return drafts for sequences with lookahead; called after every step that ran the model.

        A sequence is missing if its KV is not complete yet.
        """

    def _spread_logits(
        self, logits: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits float32 [D, V] for the vocabulary of the served model.

        logits: [D, v]. tokens: int64 [v], the ids that they belong to; None: the first v ids, of
        which those beyond V are dropped. A token without a logit has −inf. The result may share
        the memory of `logits`.
        """
        if tokens is None and logits.shape[1] == self._vocab_size:
            return logits.float()
        shape = len(logits), self._vocab_size
        spread = logits.new_full(shape, float("-inf"), dtype=torch.float32)
        if tokens is not None:
            return spread.index_copy_(1, tokens, logits.float())
        num_common = min(logits.shape[1], self._vocab_size)
        spread[:, :num_common] = logits[:, :num_common]
        return spread
