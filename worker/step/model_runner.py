"""One step on one device: apply it to the batch, build inputs, forward, logits, sample, answer.

A model beside the served one may then propose drafts (worker/speculation/).

`ModelRunner.execute` is the whole step, sampled on the host; SyncModelRunner computes it when it is
launched. A device may queue steps instead, and sample them itself (worker/cuda/async_runner.py).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from proto.codec import changed
from proto.messages.engine_io import LogprobsArrays
from proto.messages.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.messages.scheduler_output import GrammarOutput, SchedulerOutput
from proto.runtime.faults import FaultInjector
from worker.attention.backend import AttentionBackend
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import AttentionWithStates
from worker.batch.input_batch import InputBatch, build_inputs, dummy_inputs
from worker.batch.step_inputs import StepInputs, TokenAdapters, decodes_first
from worker.batch.transfers import Transfers
from worker.models.decoder import Decoder
from worker.sampling.logprobs import NO_LOGPROBS, concatenate, prompt_logprobs
from worker.sampling.sampler import Sampler
from worker.speculation.draft_sampler import Drafts, SampledStep
from worker.speculation.drafter import Drafter
from worker.step.adapter_store import AdapterStore
from worker.step.encoder_cache import NOTHING_ENCODED, EncodedSlices, EncoderCache
from worker.step.routed_experts import ExpertSpan, RoutedExpertsCache, expert_rows
from worker.step.step_sampler import StepSampler, StepSamplerOutput

LOGITS_CHUNK_BYTES: Final = 16 << 20
"""Most bytes of prompt logits in memory at once."""
NO_GRAMMARS: Final = GrammarOutput(0, 0, [], b"")

GrammarMaskSource = Callable[[SchedulerOutput], GrammarOutput]
"""Waits for the grammar masks of a step and returns them; called only if the step needs some."""


def no_grammars(step: SchedulerOutput) -> GrammarOutput:
    """The masks of runs without constrained sequences; a call is a mistake of the caller."""
    raise AssertionError(f"step {step.step} has no grammar masks")


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """A step whose hidden states are computed, or queued to be computed.

    started: monotonic time at which the step began. seq_ids: of the sequences, in the order of
    `inputs`. step_order: index in that order of each sequence of the step. row_versions: int64 [S],
    those of the batch. On the model's device:

    hidden: [T, H], of all tokens. sample_tokens: `inputs.sample_tokens`. states: kept by the
    drafter. experts: [n, mixtures, top_k], of the positions in expert_spans, span by span.

    encoded: the images that were encoded before.
    """

    step: SchedulerOutput
    started: float
    inputs: StepInputs
    seq_ids: list[int]
    step_order: list[int]
    hidden: torch.Tensor
    sample_tokens: torch.Tensor
    row_versions: NDArray[np.int64]
    states: torch.Tensor | None = None
    expert_spans: Sequence[ExpertSpan] = ()
    experts: torch.Tensor | None = None
    encoded: EncodedSlices = NOTHING_ENCODED

    def answer(
        self,
        sampled: list[list[int]],
        *,
        nonfinite: NDArray[np.bool_],
        seconds: float,
        logprobs: list[RowLogprobs],
        prompt_logprobs: Sequence[RowLogprobs] = (),
        candidates: Sequence[RowLogprobs] = (),
        experts: NDArray[np.generic] | None = None,
    ) -> ModelRunnerOutput:
        """Return the message to the engine; sampled and nonfinite are in the order of the inputs.

        seconds: compute time, without waiting for earlier steps.
        experts: `self.experts` on the host, flat or not.
        """
        routed_experts = []
        if self.experts is not None:
            assert experts is not None
            shape = tuple(self.experts.shape)
            routed_experts = expert_rows(
                self.expert_spans, experts.reshape(shape), self._num_rejected(sampled)
            )
        return ModelRunnerOutput(
            epoch=self.step.epoch,
            step=self.step.step,
            seq_ids=[self.seq_ids[index] for index in self.step_order],
            sampled_token_ids=[sampled[index] for index in self.step_order],
            logprobs=logprobs,
            prompt_logprobs=list(prompt_logprobs),
            compute_seconds=seconds,
            failed_seq_ids=[self.seq_ids[index] for index in nonfinite.nonzero()[0].tolist()],
            candidates=list(candidates),
            routed_experts=routed_experts,
            encoder_seconds=self.encoded.seconds,
            failed_mm_hashes=self.encoded.failed_mm_hashes,
        )

    def sampled_step(self, sampled: list[list[int]], batch: InputBatch) -> SampledStep:
        """Return the step as a drafter sees it; sampled as in `answer`, and in the batch."""
        step, inputs = self.step, self.inputs
        num_new = np.fromiter(map(len, sampled), np.int64, len(sampled))
        # A sequence is sampled from its last known token on.
        num_known = inputs.seq_lens - inputs.num_sampled + 1 + num_new
        num_known = np.where(inputs.num_sampled > 0, num_known, batch.num_tokens[inputs.rows])
        is_current = batch.holds(self.seq_ids, inputs.rows, self.row_versions)
        lookahead = dict(zip(step.lookahead_seq_ids, step.num_lookahead_tokens, strict=True))
        num_lookahead = np.array([lookahead.get(each, 0) for each in self.seq_ids], dtype=np.int64)
        # Edits count all tokens that the host knows, those of later steps included.
        is_behind = np.array(
            [
                row in batch.edits and num_tokens < batch.num_known(row)
                for row, num_tokens in zip(inputs.rows.tolist(), num_known.tolist(), strict=True)
            ]
        )
        num_lookahead[(num_new == 0) | ~is_current | is_behind] = 0
        return SampledStep(
            inputs=inputs,
            seq_ids=self.seq_ids,
            states=self.states,
            num_tokens=np.where(is_current, num_known, 0).astype(np.int64),
            num_lookahead=num_lookahead,
            min_acceptance_prob=step.min_draft_acceptance_prob,
        )

    def _num_rejected(self, sampled: list[list[int]]) -> dict[int, int]:
        """Return how many tokens of each draft were rejected, by seq_id."""
        index_of = {seq_id: index for index, seq_id in enumerate(self.seq_ids)}
        return {
            seq_id: len(draft) + 1 - len(sampled[index_of[seq_id]])
            for seq_id, draft in self.step.drafts.items()
        }


class ModelRunner:
    """Executes the steps of one epoch in order.

    experts: those of each token; None if they are not kept. drafter: proposes drafts when the
    tokens of a step are known. fault_injector: makes hidden states NaN in the steps of a test.
    adapters: those that rows may have; None without --enable-lora. encoder_cache: of the images of
    prompts; None for a model that reads none.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        sampler: Sampler,
        batch: InputBatch,
        kv_cache: KVCache,
        transfers: Transfers,
        experts: RoutedExpertsCache | None = None,
        drafter: Drafter | None = None,
        fault_injector: FaultInjector | None = None,
        adapters: AdapterStore | None = None,
        encoder_cache: EncoderCache | None = None,
    ) -> None:
        self._adapters = adapters
        self._encoder_cache = encoder_cache
        self._experts = experts
        self._drafter = drafter
        self._model = model
        self._attention = attention
        self._step_sampler = StepSampler(batch, sampler)
        self.batch = batch
        self.kv_cache = kv_cache
        self.transfers = transfers
        self._fault_injector = fault_injector

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    def execute(
        self, step: SchedulerOutput, get_grammars: GrammarMaskSource = no_grammars
    ) -> ModelRunnerOutput:
        """Compute a step and return its tokens, which are already in the batch."""
        forward = self.start_step(step)
        if isinstance(forward, ModelRunnerOutput):
            return forward
        output, sampled = self.finish_on_host(forward, get_grammars)
        return self.with_drafts(output, forward, sampled)

    @torch.inference_mode()
    def start_step(self, step: SchedulerOutput) -> ForwardOutput | ModelRunnerOutput:
        """Apply a step to the batch and run the model; return the answer if nothing is to run."""
        started = time.monotonic()
        step_rows = self.batch.apply(step)
        cache = self._encoder_cache
        encoded = NOTHING_ENCODED if cache is None else cache.run_step(step)
        started += encoded.seconds
        block_copies = np.array(step.block_copies, dtype=np.int64).reshape(-1, 2).T
        if step.state_copies:
            assert isinstance(self._attention, AttentionWithStates), "the model has no states"
            self._attention.states.copy_slots(step.state_copies[::2], step.state_copies[1::2])
        if len(step_rows) == 0:
            if block_copies.size:
                sources, targets = self.transfers.to_device(list(block_copies))
                self._copy_blocks(sources, targets, block_copies)
            return ModelRunnerOutput(
                step.epoch,
                step.step,
                [],
                [],
                encoder_seconds=encoded.seconds,
                failed_mm_hashes=encoded.failed_mm_hashes,
            )
        inputs, seq_ids, step_order = self._build_inputs(step, step_rows)
        if inputs.images:
            inputs = self._with_images(inputs)
        spans: list[ExpertSpan] = []
        expert_slots: list[NDArray[np.int64]] = []
        if self._experts is not None:
            spans, expert_slots = self._expert_spans(self._experts, step, inputs, seq_ids)
        rotary = inputs.rotary_positions
        places = inputs.positions if rotary is None else rotary
        arrays = [inputs.token_ids, places, inputs.sample_tokens, *block_copies]
        given = [rows for _, rows in inputs.embeddings] if inputs.embeddings else ()
        token_ids, positions, sample_tokens, sources, targets, *others = self.transfers.to_device(
            [*arrays, *expert_slots, *self._arrays_beside(inputs), *given]
        )
        positions = positions.view(places.shape)
        if block_copies.size:
            self._copy_blocks(sources, targets, block_copies)
        beside = others[len(expert_slots) :]
        with nullcontext() if inputs.adapters is None else self._adapting(inputs.adapters):
            hidden = self._run_model(inputs, token_ids, positions, beside)
        if self._fault_injector is not None and self._fault_injector.injects_nan:
            hidden = hidden * float("nan")
        states = None if self._drafter is None else self._drafter.keep_states(hidden)
        experts = None
        if self._experts is not None:
            self._experts.store(others[0])
            experts = self._experts.read(others[1]) if spans else None
        return ForwardOutput(
            step=step,
            started=started,
            inputs=inputs,
            seq_ids=seq_ids,
            step_order=step_order,
            hidden=hidden,
            sample_tokens=sample_tokens,
            row_versions=self.batch.row_versions[inputs.rows],
            states=states,
            expert_spans=spans,
            experts=experts,
            encoded=encoded,
        )

    def compute_logits(self, forward: ForwardOutput) -> torch.Tensor:
        """Return the logits [N, vocab] of the sampled positions, in the head's dtype."""
        inputs = forward.inputs
        hidden = inputs.sampled_hidden(forward.hidden, forward.sample_tokens)
        if inputs.adapters is None:
            return self._model.logits(hidden)
        with self._adapting(inputs.adapters, inputs.sample_tokens):
            return self._model.logits(hidden)

    def _adapting(
        self, adapters: TokenAdapters | None, tokens: NDArray[np.int64] | slice = slice(None)
    ) -> AbstractContextManager[None]:
        """Let the model add the adapters of the rows that it computes.

        adapters: of the step's tokens; None if none has one. tokens: the rows among these.
        """
        if adapters is None:
            return nullcontext()
        assert self._adapters is not None, "a step names adapters without --enable-lora"
        return self._adapters.running(adapters.at(tokens))

    @torch.inference_mode()
    def finish_on_host(
        self, forward: ForwardOutput, get_grammars: GrammarMaskSource
    ) -> tuple[ModelRunnerOutput, list[list[int]]]:
        """Sample on the host and append the tokens to the batch.

        Returns the answer, without drafts, and the tokens of each sequence.
        """
        inputs = forward.inputs
        nonfinite = self._nonfinite_before_logits(inputs, forward.hidden)
        sampled = self._sample(forward, nonfinite, get_grammars)
        prompts = self._prompt_logprobs(forward, nonfinite)
        experts = None
        if forward.experts is not None:
            experts = self.transfers.to_host(forward.experts).numpy()
        output = forward.answer(
            sampled.tokens,
            nonfinite=nonfinite,
            seconds=time.monotonic() - forward.started,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompts,
            candidates=sampled.candidates,
            experts=experts,
        )
        return output, sampled.tokens

    @property
    def has_drafter(self) -> bool:
        return self._drafter is not None

    def with_drafts(
        self, output: ModelRunnerOutput, forward: ForwardOutput, sampled: list[list[int]]
    ) -> ModelRunnerOutput:
        """Return the answer of a step with the drafts that its tokens lead to, if any are made.

        Called in the order of the steps, because a head stores what each step computed.
        """
        if self._drafter is None:
            return output
        drafts = self._drafter.after_step(forward.sampled_step(sampled, self.batch))
        return _with_drafts(output, drafts)

    def warm_up(self) -> None:
        """Run one token through the model, because first calls of kernels are slow.

        Its KV goes to block 0, the null block, which is never read.
        """
        self.run_dummy_step(1, 1)

    @torch.inference_mode()
    def run_dummy_step(self, num_tokens: int, num_seqs: int) -> torch.Tensor:
        """Run a step of dummy tokens in block 0; return the logits of the last token of each."""
        hidden, sample_tokens = self._run_dummy_layers(num_tokens, num_seqs)
        return self._model.float32_logits(hidden.index_select(0, sample_tokens))

    def _run_dummy_layers(
        self, num_tokens: int, num_seqs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers for such a step; return all hidden states, and each last token's index."""
        inputs = dummy_inputs(
            num_tokens,
            num_seqs,
            self.batch.block_table,
            self._attention.query_split,
            has_states=self.batch.has_states,
        )
        token_ids, positions, sample_tokens = self.transfers.to_device(
            [inputs.token_ids, inputs.positions, inputs.sample_tokens]
        )
        self._attention.plan(inputs.attention)
        return self._model.forward(token_ids, positions, self._attention), sample_tokens

    def _copy_blocks(
        self, sources: torch.Tensor, copies: torch.Tensor, on_host: NDArray[np.int64]
    ) -> None:
        self.kv_cache.copy_blocks(sources, copies)
        if self._experts is not None:
            self._experts.copy_blocks(sources, copies)
        if self._drafter is not None:
            self._drafter.copy_blocks(*on_host)

    def _expert_spans(
        self,
        experts: RoutedExpertsCache,
        step: SchedulerOutput,
        inputs: StepInputs,
        seq_ids: Sequence[int],
    ) -> tuple[list[ExpertSpan], list[NDArray[np.int64]]]:
        """Return the positions whose experts the step returns, and the KV slots of the experts.

        The slots are those of all tokens, int64 [T], and those of the positions, int64 [n].

            cached prefix   | this step |            first step of a sequence: all of both
                              | this step |          a later one: its own
        """
        batch, group = self.batch, experts.group
        begins = {new.seq_id for new in step.new_requests}
        begins.update(step.cached_requests.resumed_seq_ids)
        spans, slots = [], [np.empty(0, dtype=np.int64)]
        for index, seq_id in enumerate(seq_ids):
            if not batch.params(seq_id).return_routed_experts:
                continue
            first = 0 if seq_id in begins else int(inputs.num_computed[index])
            end = int(inputs.seq_lens[index])
            spans.append(ExpertSpan(seq_id, first, end - first))
            slots.append(batch.block_table.slots(group, int(inputs.rows[index]), first, end))
        return spans, [inputs.attention[group].slot_mapping, np.concatenate(slots)]

    def _build_inputs(
        self, step: SchedulerOutput, step_rows: NDArray[np.int64]
    ) -> tuple[StepInputs, list[int], list[int]]:
        """Return inputs, seq_ids and step_order of `ForwardOutput`."""
        seq_ids = [new.seq_id for new in step.new_requests] + step.cached_requests.seq_ids
        split = self._attention.query_split
        if not self.transfers.decodes_first:
            inputs = build_inputs(step, step_rows, self.batch, query_split=split)
            return inputs, seq_ids, list(range(len(seq_ids)))
        order = decodes_first(step)
        inputs = build_inputs(step, step_rows, self.batch, order, query_split=split)
        return inputs, [seq_ids[index] for index in order], np.argsort(order).tolist()

    def _with_images(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs with the rows of images as embeddings."""
        assert self._encoder_cache is not None, "the model reads no images"
        hidden_size = self._model.spec.hidden_size
        rows = tuple(
            (taken.first_token, self._encoder_cache.rows(taken.mm_hash, taken.rows, hidden_size))
            for taken in inputs.images
        )
        return replace(inputs, embeddings=(*inputs.embeddings, *rows))

    def _arrays_beside(self, inputs: StepInputs) -> Sequence[NDArray[np.int64]]:
        """Return more arrays that a step needs on the device."""
        return ()

    def _run_model(
        self,
        inputs: StepInputs,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        beside: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the hidden states [T, H] of a step; they are valid until the next step.

        beside: `_arrays_beside` on the device, then the rows of `StepInputs.embeddings`.
        """
        self._attention.plan(inputs.attention)
        embeddings: Sequence[tuple[int, torch.Tensor]] = ()
        if inputs.embeddings:
            given = zip(inputs.embeddings, beside[-len(inputs.embeddings) :], strict=True)
            embeddings = [(first, rows.view(array.shape)) for (first, array), rows in given]
        return self._model.forward(token_ids, positions, self._attention, embeddings=embeddings)

    def _sample(
        self, forward: ForwardOutput, nonfinite: NDArray[np.bool_], get_grammars: GrammarMaskSource
    ) -> StepSamplerOutput:
        """Sample the step's positions. nonfinite: bool [S], as in `StepSampler.sample_step`."""
        inputs, step = forward.inputs, forward.step
        if len(inputs.sample_tokens) == 0:
            return StepSamplerOutput([[] for _ in forward.seq_ids])
        logits = self.transfers.to_host(self.compute_logits(forward))
        return self._step_sampler.sample_step(
            inputs,
            forward.seq_ids,
            logits,
            nonfinite,
            lambda: get_grammars(step) if step.constrained_seq_ids else NO_GRAMMARS,
        )

    def _prompt_logprobs(
        self, forward: ForwardOutput, nonfinite: NDArray[np.bool_]
    ) -> list[RowLogprobs]:
        """Return the log-probabilities of the prompt tokens that follow the step's tokens.

        The hidden state at position p gives the log-probability of prompt token p + 1.
        """
        inputs, batch = forward.inputs, self.batch
        found: list[RowLogprobs] = []
        requested = (batch.num_prompt_logprobs[inputs.rows] != NO_LOGPROBS) & ~nonfinite
        for sequence in requested.nonzero()[0].tolist():
            row = inputs.rows[sequence]
            first = int(inputs.num_computed[sequence]) + 1
            end = min(int(inputs.seq_lens[sequence]) + 1, int(batch.num_prompt_tokens[row]))
            if first >= end:
                continue
            start = int(inputs.query_start[sequence])
            tokens = slice(start, start + end - first)
            arrays = self._prompt_logprobs_of(
                forward.hidden[tokens],
                inputs.adapters and inputs.adapters.at(tokens),
                batch.token_ids[row, first:end].astype(np.int64),
                int(batch.num_prompt_logprobs[row]),
                first,
            )
            found.append(RowLogprobs(forward.seq_ids[sequence], arrays))
        return found

    def _prompt_logprobs_of(
        self,
        hidden: torch.Tensor,
        adapters: TokenAdapters | None,
        token_ids: NDArray[np.int64],
        num_logprobs: int,
        first: int,
    ) -> LogprobsArrays:
        """Return the log-probabilities of `token_ids` [P] given `hidden` [P, H], in chunks."""
        size = max(1, LOGITS_CHUNK_BYTES // (self._model.spec.vocab_size * 4))
        found = []
        for start in range(0, len(token_ids), size):
            tokens = slice(start, start + size)
            with self._adapting(adapters, tokens):
                logits = self.transfers.to_host(self._model.float32_logits(hidden[tokens]))
            found.append(prompt_logprobs(logits, token_ids[tokens], num_logprobs, first + start))
        return concatenate(found)

    def _nonfinite_before_logits(
        self, inputs: StepInputs, hidden: torch.Tensor
    ) -> NDArray[np.bool_]:
        """Return the sequences, bool [S], with nonfinite hidden states, unless logits show them.

        The last norm turns a whole row into NaN if one of its elements is not finite, and so all of
        its logits, which the sampler checks. If all tokens have logits, nothing is left to check.
        """
        if inputs.samples_every_token:
            return np.zeros(len(inputs.rows), dtype=np.bool_)
        nonfinite = self.transfers.nonfinite_sequences(hidden, inputs.query_start)
        # All tokens of a sequence with a draft have logits, and those behind a rejected token do
        # not count.
        return nonfinite & (inputs.num_sampled <= 1)


class FinishedStep:
    """A launched step that is computed; QueuedStep (worker/cuda/async_runner.py) is not.

    result: returns its answer; called in the order of the steps.
    """

    def __init__(self, result: Callable[[], ModelRunnerOutput]) -> None:
        self.result = result

    def is_ready(self) -> bool:
        return True


class SyncModelRunner:
    """Computes a step when it is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(
        self, step: SchedulerOutput, get_grammars: GrammarMaskSource = no_grammars
    ) -> FinishedStep:
        output = self._runner.execute(step, get_grammars)
        return FinishedStep(lambda: output)


def _with_drafts(output: ModelRunnerOutput, drafts: Drafts) -> ModelRunnerOutput:
    return changed(
        output,
        draft_seq_ids=drafts.seq_ids,
        draft_token_ids=drafts.token_ids,
        draft_acceptance_probs=drafts.acceptance_probs,
        draft_pass_rows=drafts.pass_rows,
        draft_pass_seconds=drafts.pass_seconds,
    )
