"""One step on one device: rows, block copies, attention plan, forward, logits, sample.

Owns the rows; the model and the KV cache are given to it. Knows nothing of sockets. What
samples here does so on the host (step_sampler.py), where the logits of another device are
fetched to; tokens that stay on such a device are ahead.py's.
"""

import time
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from proto.engine_io import LogprobsArrays
from proto.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from worker.attention.base import AttentionBackend
from worker.device.placement import OnHost, Placement
from worker.forward import EagerForward, Forward
from worker.input_batch import (
    NO_LOGPROBS,
    InputBatch,
    StepInputs,
    build_inputs,
    decodes_first,
    dummy_inputs,
)
from worker.kv_cache import KVCache
from worker.models.decoder import Decoder
from worker.nonfinite import broken_sequences, odd_tokens, sequences_of
from worker.sampling.grammar_masks import MaskSource, NoMasks
from worker.sampling.logprobs import prompt_logprobs
from worker.sampling.sampler import Chosen, Sampler, StepSampler

LOGITS_CHUNK_BYTES: Final = 64 << 20
"""Most memory that the logits of prompt positions take at once."""
NO_MASKS: Final = NoMasks()
NO_GRAMMARS: Final = GrammarOutput(0, 0, [], b"")


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """A step whose hidden states are computed, or queued to be.

    seq_ids: of the sequences as `inputs` has them. back: place of each sequence of the
    step among those. hidden [T, H] and last_token, that of the inputs, are where the model is.
    """

    step: SchedulerOutput
    started: float
    inputs: StepInputs
    seq_ids: list[int]
    back: list[int]
    hidden: torch.Tensor
    last_token: torch.Tensor

    def output(
        self,
        sampled: list[list[int]],
        broken: NDArray[np.bool_],
        logprobs: list[RowLogprobs],
        prompt_logprobs: list[RowLogprobs],
        candidates: list[RowLogprobs],
        seconds: float,
    ) -> ModelRunnerOutput:
        """The answer, in the step's own order; sampled and broken are in that of the inputs.

        seconds: that the step took, waiting for another not counted.
        """
        return ModelRunnerOutput(
            self.step.epoch,
            self.step.step,
            [self.seq_ids[at] for at in self.back],
            [sampled[at] for at in self.back],
            logprobs,
            prompt_logprobs,
            seconds,
            failed_seq_ids=[self.seq_ids[at] for at in broken.nonzero()[0].tolist()],
            candidates=candidates,
        )


class TokenSource(Protocol):
    """Where tokens are that were sampled and are not on the host yet."""

    def rows_of(self, inputs: StepInputs) -> NDArray[np.int64]:
        """What `fill` needs to know of a step, where the model is."""
        ...

    def fill(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] with those in place that are missing; rows: from `rows_of`."""
        ...


class NothingMissing:
    """TokenSource of a runner whose tokens are all on the host."""

    def rows_of(self, inputs: StepInputs) -> NDArray[np.int64]:
        """Whatever is at hand: nobody asks."""
        return inputs.last_token

    def fill(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The same."""
        return token_ids


ON_HOST: Final = OnHost()
NOTHING_MISSING: Final = NothingMissing()


class ModelRunner:
    """Executes the steps of one epoch in order."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        sampler: Sampler,
        rows: InputBatch,
        kv_cache: KVCache,
        placement: Placement = ON_HOST,
        forward: Forward | None = None,
        tokens: TokenSource = NOTHING_MISSING,
    ) -> None:
        self._model = model
        self._attention = attention
        self._step_sampler = StepSampler(rows, sampler)
        self._rows = rows
        self.kv_cache = kv_cache
        self._placement = placement
        self._forward = forward or EagerForward(model, attention)
        self._tokens = tokens

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._model.spec.vocab_size

    def execute(self, step: SchedulerOutput, masks: MaskSource = NO_MASKS) -> ModelRunnerOutput:
        """Compute a step and return its tokens. masks: asked when there are logits.

        The input batch is updated before this returns, so the next step may follow at once.
        """
        begun = self.begin(step)
        return self.complete(begun, masks) if isinstance(begun, ForwardOutput) else begun

    @torch.inference_mode()
    def begin(self, step: SchedulerOutput) -> ForwardOutput | ModelRunnerOutput:
        """Take over what the step changes and run the model; the answer where nothing runs."""
        started = time.monotonic()
        step_rows = self._rows.apply(step)
        # source, copy, source, copy …
        block_copies = np.array(step.block_copies, dtype=np.int64).reshape(-1, 2)
        if len(step_rows) == 0:
            if len(block_copies):
                self.kv_cache.copy_blocks(*self._placement.send(list(block_copies.T)))
            return ModelRunnerOutput(step.epoch, step.step, [], [])
        seq_ids = [new.seq_id for new in step.new_requests] + step.cached_requests.seq_ids
        back = list(range(len(seq_ids)))
        if self._placement.decodes_first:
            order = decodes_first(step)
            inputs = build_inputs(step, step_rows, self._rows, order)
            seq_ids = [seq_ids[at] for at in order]
            back = np.argsort(order).tolist()
        else:
            inputs = build_inputs(step, step_rows, self._rows)
        token_ids, positions, last_token, rows, sources, copies = self._placement.send(
            [
                inputs.token_ids,
                inputs.positions,
                inputs.last_token,
                self._tokens.rows_of(inputs),
                *block_copies.T,
            ]
        )
        if len(block_copies):
            self.kv_cache.copy_blocks(sources, copies)
        hidden = self._forward(inputs, self._tokens.fill(token_ids, rows), positions)
        return ForwardOutput(step, started, inputs, seq_ids, back, hidden, last_token)

    @torch.inference_mode()
    def complete(self, begun: ForwardOutput, masks: MaskSource) -> ModelRunnerOutput:
        """Sample on the host; every row has its tokens then. masks: as of `execute`."""
        inputs, seq_ids = begun.inputs, begun.seq_ids
        broken = self._broken_before_scores(inputs, begun.hidden)
        chosen = self._sample(begun, broken, masks)
        prompts = self._prompt_logprobs(inputs, begun.hidden, seq_ids, broken)
        seconds = time.monotonic() - begun.started
        return begun.output(
            chosen.tokens, broken, chosen.logprobs, prompts, chosen.candidates, seconds
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one token through the model: first calls of kernels are slow.

        Its KV goes to block 0, the null block, which is never read.
        """
        self.run_nobodys(1, 1)

    @torch.inference_mode()
    def run_nobodys(self, num_tokens: int, num_seqs: int) -> torch.Tensor:
        """A step of nobody's tokens, dealt over so many sequences: the logits of each of these.

        All of it reads and writes block 0.
        """
        inputs = dummy_inputs(num_tokens, num_seqs, self._rows.block_table)
        token_ids, positions, last_token = self._placement.send(
            [inputs.token_ids, inputs.positions, inputs.last_token]
        )
        self._attention.plan(inputs.attention)
        hidden = self._model.forward(token_ids, positions, self._attention)
        return self._model.float32_logits(hidden.index_select(0, last_token))

    def _sample(self, begun: ForwardOutput, broken: NDArray[np.bool_], masks: MaskSource) -> Chosen:
        """Tokens of the sequences that are complete; broken: bool [S], as StepSampler has it."""
        if len(begun.inputs.last_token) == 0:
            return Chosen([[] for _ in begun.seq_ids], [], [])

        def grammars() -> GrammarOutput:
            constrained = begun.step.constrained_seq_ids
            return masks.masks_of(begun.step) if constrained else NO_GRAMMARS

        scores = self._placement.fetch(self.scores(begun))
        return self._step_sampler.choose(begun.inputs, begun.seq_ids, scores, broken, grammars)

    def scores(self, begun: ForwardOutput) -> torch.Tensor:
        """Logits [N, vocab] of the sequences that sample, of the head's dtype."""
        return self._model.logits(begun.inputs.rows_that_sample(begun.hidden, begun.last_token))

    def _prompt_logprobs(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor,
        seq_ids: list[int],
        broken: NDArray[np.bool_],
    ) -> list[RowLogprobs]:
        """Position p's hidden state gives the log-probability of prompt token p + 1."""
        found: list[RowLogprobs] = []
        asking = (self._rows.num_prompt_logprobs[inputs.rows] != NO_LOGPROBS) & ~broken
        for sequence in asking.nonzero()[0].tolist():
            row = inputs.rows[sequence]
            first = int(inputs.num_computed[sequence]) + 1
            end = min(int(inputs.seq_lens[sequence]) + 1, int(self._rows.num_prompt_tokens[row]))
            if first >= end:
                continue
            start = int(inputs.query_start[sequence])
            arrays = self._prompt_arrays(
                hidden[start : start + end - first],
                self._rows.token_ids[row, first:end].astype(np.int64),
                int(self._rows.num_prompt_logprobs[row]),
                first,
            )
            found.append(RowLogprobs(seq_ids[sequence], arrays))
        return found

    def _prompt_arrays(
        self, hidden: torch.Tensor, token_ids: NDArray[np.int64], wanted: int, first: int
    ) -> LogprobsArrays:
        """Log-probabilities of `token_ids` [P] given `hidden` [P, H], in chunks of rows."""
        rows = max(1, LOGITS_CHUNK_BYTES // (self._model.spec.vocab_size * 4))
        chunks = [
            prompt_logprobs(
                self._placement.fetch(self._model.float32_logits(hidden[at : at + rows])),
                token_ids[at : at + rows],
                wanted,
                first,
            )
            for at in range(0, len(token_ids), rows)
        ]
        return LogprobsArrays(
            first,
            chunks[0].width,
            b"".join(chunk.token_ids for chunk in chunks),
            b"".join(chunk.logprobs for chunk in chunks),
            b"".join(chunk.ranks for chunk in chunks),
        )

    def _broken_before_scores(self, inputs: StepInputs, hidden: torch.Tensor) -> NDArray[np.bool_]:
        """Bool [S]: sequences whose hidden states are no numbers, where scores will not show it.

        A row's norm makes all of it NaN where one of its elements is NaN or infinite, and so
        all of its scores, which are looked at anyway. So nothing is left to find where all
        rows have some.
        """
        if len(inputs.last_token) == len(inputs.token_ids):
            return np.zeros(len(inputs.samples), dtype=np.bool_)
        if hidden.device.type == "cpu":
            return broken_sequences(hidden, inputs.query_start)
        return sequences_of(self._placement.fetch(odd_tokens(hidden)), inputs.query_start)
