"""One step on one device: rows, block copies, attention plan, forward, logits, sample.

Owns the rows; the model and the KV cache are given to it. Knows nothing of sockets. What
samples here does so on the host, where the logits of another device are fetched to; tokens
that stay on such a device are ahead.py's.
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
from worker.batch.inputs import StepInputs, build_inputs, decodes_first, nobodys_inputs
from worker.batch.rows import NO_LOGPROBS, Rows
from worker.device.placement import OnHost, Placement
from worker.finite import broken_sequences, odd_tokens, sequences_of
from worker.forward import EagerForward, Forward
from worker.kv_cache import KVCache
from worker.models.decoder import Decoder
from worker.sample.grammar_masks import MaskSource, NoMasks, row_masks
from worker.sample.logprobs import best_continuations, prompt_logprobs
from worker.sample.row_edits import RowEdits
from worker.sample.rows import SamplingRows
from worker.sample.sampler import Sampler

LOGITS_CHUNK_BYTES: Final = 64 << 20
"""Most memory that the logits of prompt positions take at once."""
NO_MASKS: Final = NoMasks()
NO_GRAMMARS: Final = GrammarOutput(0, 0, [], b"")


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose hidden states are computed, or queued to be.

    handles: of the sequences as `inputs` has them. back: place of each sequence of the
    step among those. hidden [T, H] and last_token, that of the inputs, are where the model is.
    """

    step: SchedulerOutput
    started: float
    inputs: StepInputs
    handles: list[int]
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
    ) -> ModelRunnerOutput:
        """The answer, in the step's own order; sampled and broken are in that of the inputs."""
        return ModelRunnerOutput(
            self.step.epoch,
            self.step.step,
            [self.handles[at] for at in self.back],
            [sampled[at] for at in self.back],
            logprobs,
            prompt_logprobs,
            time.monotonic() - self.started,
            failed_handles=[self.handles[at] for at in broken.nonzero()[0].tolist()],
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
        rows: Rows,
        kv_cache: KVCache,
        placement: Placement = ON_HOST,
        forward: Forward | None = None,
        tokens: TokenSource = NOTHING_MISSING,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
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

        Rows are updated before this returns, so the next step may follow at once.
        """
        begun = self.begin(step)
        return self.complete(begun, masks) if isinstance(begun, Begun) else begun

    @torch.inference_mode()
    def begin(self, step: SchedulerOutput) -> Begun | ModelRunnerOutput:
        """Take over what the step changes and run the model; the answer where nothing runs."""
        started = time.monotonic()
        step_rows = self._rows.apply(step)
        if step.block_copies:
            self.kv_cache.copy_blocks(step.block_copies)
        if len(step_rows) == 0:
            return ModelRunnerOutput(step.epoch, step.step, [], [])
        handles = [new.handle for new in step.new_requests] + step.cached_requests.handles
        back = list(range(len(handles)))
        if self._placement.decodes_first:
            order = decodes_first(step)
            inputs = build_inputs(step, step_rows, self._rows, order)
            handles = [handles[at] for at in order]
            back = np.argsort(order).tolist()
        else:
            inputs = build_inputs(step, step_rows, self._rows)
        token_ids, positions, last_token, rows = self._placement.send(
            [
                inputs.token_ids,
                inputs.positions,
                inputs.last_token,
                self._tokens.rows_of(inputs),
            ]
        )
        hidden = self._forward(inputs, self._tokens.fill(token_ids, rows), positions)
        return Begun(step, started, inputs, handles, back, hidden, last_token)

    @torch.inference_mode()
    def complete(self, begun: Begun, masks: MaskSource) -> ModelRunnerOutput:
        """Sample on the host; every row has its tokens then. masks: as of `execute`."""
        inputs, handles = begun.inputs, begun.handles
        broken = self._broken_before_scores(inputs, begun.hidden)
        sampled, logprobs, candidates = self._sample(begun, handles, broken, masks)
        prompts = self._prompt_logprobs(inputs, begun.hidden, handles, broken)
        return begun.output(sampled, broken, logprobs, prompts, candidates)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one token through the model: first calls of kernels are slow.

        Its KV goes to block 0, the null block, which nobody reads.
        """
        self.run_nobodys(1, 1)

    @torch.inference_mode()
    def run_nobodys(self, num_tokens: int, num_seqs: int) -> torch.Tensor:
        """A step of nobody's tokens, dealt over so many sequences: the logits of each of these.

        All of it reads and writes block 0.
        """
        inputs = nobodys_inputs(num_tokens, num_seqs, self._rows.block_table)
        token_ids, positions, last_token = self._placement.send(
            [inputs.token_ids, inputs.positions, inputs.last_token]
        )
        self._attention.plan(inputs.attention)
        hidden = self._model.forward(token_ids, positions, self._attention)
        return self._model.logits(hidden.index_select(0, last_token))

    def _sample(
        self,
        begun: Begun,
        handles: list[int],
        broken: NDArray[np.bool_],
        masks: MaskSource,
    ) -> tuple[list[list[int]], list[RowLogprobs], list[RowLogprobs]]:
        """Draw a token for each sequence that is complete; append it to its row.

        Rows of a beam search have candidates instead.
        broken: bool [S], marked further where logits are odd. Such a sequence samples
        nothing, but its row gets a token all the same: a step may be waiting for it.
        """
        inputs = begun.inputs
        if len(inputs.last_token) == 0:
            return [[] for _ in handles], [], []
        sequences = inputs.samples.nonzero()[0]
        scores = self._placement.fetch(self.scores(begun))
        best = self._sampler.best(scores)
        broken[sequences] |= best.broken
        grammars = masks.masks_of(begun.step) if begun.step.constrained_handles else NO_GRAMMARS
        plain = self._rows.plain[inputs.rows[sequences]] & ~_has_mask(grammars, handles, sequences)
        if plain.all():
            return self._append(inputs, sequences, best.token_ids, broken), [], []
        if not plain.any():
            return self._sample_each(inputs, scores.float(), handles, sequences, broken, grammars)
        # What the others want is no work for these.
        greedy = self._append(inputs, sequences[plain], best.token_ids[plain], broken)
        tokens, logprobs, candidates = self._sample_each(
            inputs,
            scores[torch.from_numpy(~plain)].float(),
            handles,
            sequences[~plain],
            broken,
            grammars,
        )
        return [a or b for a, b in zip(greedy, tokens, strict=True)], logprobs, candidates

    def scores(self, begun: Begun) -> torch.Tensor:
        """Logits [N, vocab] of the sequences that sample, of the head's dtype."""
        return self._model.scores(begun.inputs.rows_that_sample(begun.hidden, begun.last_token))

    def _append(
        self,
        inputs: StepInputs,
        sequences: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        broken: NDArray[np.bool_],
    ) -> list[list[int]]:
        """Give the rows of `sequences` their tokens; what each sequence of the step reports."""
        self._rows.append_sampled(inputs.rows[sequences], token_ids)
        tokens: list[list[int]] = [[] for _ in broken]
        sound = ~broken[sequences]
        for sequence, token_id in zip(
            sequences[sound].tolist(), token_ids[sound].tolist(), strict=True
        ):
            tokens[sequence].append(token_id)
        return tokens

    def _sample_each(
        self,
        inputs: StepInputs,
        logits: torch.Tensor,
        handles: list[int],
        sequences: NDArray[np.int64],
        broken: NDArray[np.bool_],
        grammars: GrammarOutput,
    ) -> tuple[list[list[int]], list[RowLogprobs], list[RowLogprobs]]:
        """The same where rows want more than their best token; logits float32 [N, V] are spent."""
        if broken.any():
            logits[torch.from_numpy(broken[sequences])] = 0.0
        candidates: list[RowLogprobs] = []
        beams = self._rows.num_candidates[inputs.rows[sequences]] > 0
        if beams.any():
            found = sequences[beams]
            best = self._candidates(
                logits[torch.from_numpy(beams)], inputs.rows[found], [handles[i] for i in found]
            )
            logits, sequences = logits[torch.from_numpy(~beams)], sequences[~beams]
            candidates = list(map(RowLogprobs, [handles[i] for i in found], best))
        if len(sequences) == 0:
            return [[] for _ in handles], [], candidates
        request = self._sampling_rows(
            inputs.rows[sequences], [handles[i] for i in sequences], grammars
        )
        result = self._sampler.sample(logits, request)
        tokens = self._append(inputs, sequences, result.token_ids, broken)
        logprobs = [
            RowLogprobs(handles[sequence], arrays)
            for sequence, arrays in zip(sequences, result.logprobs, strict=True)
            if arrays is not None and not broken[sequence]
        ]
        return tokens, logprobs, candidates

    def _candidates(
        self, logits: torch.Tensor, at: NDArray[np.int64], handles: list[int]
    ) -> list[LogprobsArrays]:
        position = self._rows.num_tokens[at] - self._rows.num_prompt_tokens[at]
        return best_continuations(
            logits,
            self._rows.num_candidates[at],
            position.astype(np.uint32),
            self._suppressed(at, position, handles),
        )

    def _suppressed(
        self, at: NDArray[np.int64], position: NDArray[np.int32], handles: list[int]
    ) -> tuple[tuple[int, NDArray[np.int64]], ...]:
        """Stop tokens of the rows that may not end yet, as SamplingRows has them."""
        rows = self._rows
        return tuple(
            (int(i), np.array(sorted(rows.params(handles[i]).stop_ids), dtype=np.int64))
            for i in np.flatnonzero(position < rows.min_output[at])
        )

    def _sampling_rows(
        self, at: NDArray[np.int64], handles: list[int], grammars: GrammarOutput
    ) -> SamplingRows:
        rows = self._rows
        position = rows.num_tokens[at] - rows.num_prompt_tokens[at]
        return SamplingRows(
            temperature=rows.temperature[at],
            top_k=rows.top_k[at],
            top_p=rows.top_p[at],
            min_p=rows.min_p[at],
            seed=rows.seed[at],
            choice=rows.choice[at],
            position=position.astype(np.uint32),
            num_logprobs=rows.num_logprobs[at],
            suppressed=self._suppressed(at, position, handles),
            edits=self._edits(at),
            named=self._named(at, handles),
            masks=row_masks(grammars, handles),
        )

    def _edits(self, at: NDArray[np.int64]) -> tuple[tuple[int, RowEdits], ...]:
        edits = self._rows.edits
        if not edits:
            return ()
        return tuple((i, edits[row]) for i, row in enumerate(at.tolist()) if row in edits)

    def _named(
        self, at: NDArray[np.int64], handles: list[int]
    ) -> tuple[tuple[int, NDArray[np.int64]], ...]:
        """Tokens whose log-probabilities are asked for by name."""
        asking = np.flatnonzero(self._rows.num_logprobs[at] != NO_LOGPROBS).tolist()
        named = [(i, self._rows.params(handles[i]).logprob_token_ids) for i in asking]
        return tuple((i, np.array(ids, dtype=np.int64)) for i, ids in named if ids)

    def _prompt_logprobs(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor,
        handles: list[int],
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
            found.append(RowLogprobs(handles[sequence], arrays))
        return found

    def _prompt_arrays(
        self, hidden: torch.Tensor, token_ids: NDArray[np.int64], wanted: int, first: int
    ) -> LogprobsArrays:
        """Log-probabilities of `token_ids` [P] given `hidden` [P, H], in chunks of rows."""
        rows = max(1, LOGITS_CHUNK_BYTES // (self._model.spec.vocab_size * 4))
        chunks = [
            prompt_logprobs(
                self._placement.fetch(self._model.logits(hidden[at : at + rows])),
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


def _has_mask(
    grammars: GrammarOutput, handles: list[int], sequences: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Bool [N], for each of the sequences that sample."""
    masked = set(grammars.handles)
    return np.fromiter((handles[i] in masked for i in sequences), np.bool_, len(sequences))
