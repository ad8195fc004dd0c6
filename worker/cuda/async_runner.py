"""Steps that are queued on a device before the tokens of the step before are known.

    host      launch 1 │ launch 2 │ tokens of 1 ─▶ engine │ launch 3 │ tokens of 2 …
    device             [ step 1 ][ step 2 ................ ][ step 3 …

Sampled tokens stay on the device, where the next step reads them (`last_tokens`); their copies
reach the host behind an event, and until then the batch holds PENDING_TOKEN. Logits are edited and
log-probabilities computed on the device as well. Grammar masks depend on the tokens before, so the
host waits for them while the model computes. A step with beam candidates or prompt
log-probabilities is sampled on the host, when all steps before it have finished.

Which tokens of a draft were accepted is known on the host, with the tokens. Until then the engine
plans no other step of the sequence, so no later step in the queue depends on it.

A drafter in the worker runs when the answer of a step is collected (worker/speculation/drafter.py).
Its passes are queued behind the steps that were launched meanwhile, and waited for.

Read from top to bottom: AsyncModelRunner.launch queues the model (CudaModelRunner) and the sampling
(DeviceSampler in sampling/device_sampler.py), and QueuedStep.result makes the answer of what comes
back.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from proto.messages.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.messages.scheduler_output import GrammarOutput, SchedulerOutput
from worker.batch.input_batch import PENDING_TOKEN, InputBatch, PendingTokens
from worker.batch.step_inputs import SampledPositions, StepInputs
from worker.batch.transfers import any_token_of_sequences, nonfinite_tokens
from worker.cuda.accelerator import Accelerator
from worker.cuda.graphs import DecodeGraphs
from worker.cuda.sampling.device_sampler import DeviceSampler, LogprobRequests
from worker.cuda.transfers import Download, Downloader, QueuedTransfers
from worker.sampling.logprobs import logprobs_of_sequences, pack_logprobs
from worker.step.model_runner import (
    NO_GRAMMARS,
    FinishedStep,
    ForwardOutput,
    GrammarMaskSource,
    ModelRunner,
    no_grammars,
)


class AsyncModelRunner:
    """Queues a step on an accelerator when it is launched; the next may be launched at once."""

    def __init__(
        self,
        runner: "CudaModelRunner",
        accelerator: Accelerator,
        sampler: DeviceSampler,
    ) -> None:
        self._runner = runner
        self._batch = runner.batch
        self._transfers = QueuedTransfers(accelerator)
        self._downloader = Downloader(accelerator)
        self._sampler = sampler
        self._in_flight: list[QueuedStep] = []
        self._device_time = DeviceTime()

    def launch(
        self, step: SchedulerOutput, get_grammars: GrammarMaskSource = no_grammars
    ) -> "FinishedStep | QueuedStep":
        """Queue a step; wait for the device only if a result has to be computed on the host."""
        forward = self._runner.start_step(step)
        if isinstance(forward, ModelRunnerOutput):
            return FinishedStep(lambda: forward)
        inputs = forward.inputs
        if self._batch.need_host(inputs.rows, inputs.num_computed).any():
            return self._finish_on_host(forward, get_grammars)
        grammars = get_grammars(step) if step.constrained_seq_ids else NO_GRAMMARS
        # The device's logit edits allow for one unknown token of a row, that of the step before.
        waits_for_all = self._batch.drafts_need_tokens(step)
        self._wait_for_tokens(self._in_flight if waits_for_all else self._in_flight[:-1])
        queued = self._queue_sampling(forward, grammars)
        self._in_flight = [*self._in_flight[-1:], queued]
        return queued

    @torch.inference_mode()
    def _queue_sampling(self, forward: ForwardOutput, grammars: GrammarOutput) -> "QueuedStep":
        """Queue logits, sampling and the copy of the results to the host."""
        positions = self._batch.sampled_positions(forward.inputs, forward.seq_ids)
        nonfinite = nonfinite_tokens(forward.hidden)
        requests = LogprobRequests.of(self._batch, positions)
        logprobs: list[torch.Tensor] = []
        if len(positions):
            logits = self._runner.compute_logits(forward)
            best = logits.amax(dim=1).float()
            token_ids, logprobs = self._sampler.sample(logits, positions, grammars, requests)
            self._keep_last_tokens(positions, token_ids)
        else:
            best = nonfinite.new_empty(0, dtype=torch.float32)
            token_ids = nonfinite.new_empty(0).long()
        experts = [] if forward.experts is None else [forward.experts]
        download = self._downloader.start_download(
            [token_ids, best, nonfinite, *logprobs, *experts]
        )
        pending = self._batch.append_pending(positions)
        return QueuedStep(
            owner=self,
            forward=forward,
            batch=self._batch,
            positions=positions,
            pending=pending,
            logprobs=requests,
            download=download,
            device_time=self._device_time,
        )

    def _keep_last_tokens(self, positions: SampledPositions, token_ids: torch.Tensor) -> None:
        """Keep the token of each row's last position for the next step."""
        last = positions.last_of_rows()
        if last is None:
            (rows,) = self._transfers.to_device([positions.rows])
        else:
            rows, index = self._transfers.to_device([positions.rows[last], last])
            token_ids = token_ids.index_select(0, index)
        self._runner.last_tokens.index_copy_(0, rows, token_ids)

    def _wait_for_tokens(self, steps: "list[QueuedStep]") -> None:
        for step in steps:
            step.wait_for_tokens()

    def _finish_on_host(
        self, forward: ForwardOutput, get_grammars: GrammarMaskSource
    ) -> FinishedStep:
        self._wait_for_tokens(self._in_flight)
        self._in_flight.clear()
        forward = replace(forward, started=self._device_time.start_of(forward.started))
        output, sampled = self._runner.finish_on_host(forward, get_grammars)
        self._device_time.end_step(forward.started)
        # Its drafts are made behind those of the steps before.
        return FinishedStep(lambda: self.with_drafts(output, forward, sampled))

    def with_drafts(
        self, output: ModelRunnerOutput, forward: ForwardOutput, sampled: list[list[int]]
    ) -> ModelRunnerOutput:
        """Return the answer of a step with the drafts that its tokens lead to.

        Called when its tokens are in the batch. If there are drafts to make, all steps in the queue
        are waited for first: their time and that of the passes are then known apart.
        """
        if not self._runner.has_drafter:
            return output
        if forward.step.lookahead_seq_ids:
            for step in self._in_flight:
                step.wait_for_end()
        begin = time.monotonic()
        output = self._runner.with_drafts(output, forward, sampled)
        if forward.step.lookahead_seq_ids:
            self._device_time.leave_out(begin)
        return output


class CudaModelRunner(ModelRunner):
    """A ModelRunner on a GPU.

    last_tokens: the last sampled token of each row, int64 [rows], on the device, before it has
        reached the host.
    graphs: of decode steps, or None.
    """

    def __init__(
        self, last_tokens: torch.Tensor, graphs: DecodeGraphs | None, *args: Any, **fields: Any
    ) -> None:
        super().__init__(*args, **fields)
        self.last_tokens = last_tokens
        self._graphs = graphs

    def _arrays_beside(self, inputs: StepInputs) -> Sequence[npt.NDArray[np.int64]]:
        """Return the row of each token."""
        return (np.repeat(inputs.rows, np.diff(inputs.query_start)),)

    def _run_model(
        self,
        inputs: StepInputs,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        beside: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        token_ids = self._fill_pending(token_ids, beside[0])
        if (
            self._graphs is not None
            and not inputs.embeddings
            and self._graphs.fits(inputs.attention)
        ):
            return self._graphs.replay(inputs.attention, token_ids, positions)
        return super()._run_model(inputs, token_ids, positions, beside)

    def _fill_pending(self, token_ids: torch.Tensor, token_rows: torch.Tensor) -> torch.Tensor:
        """Return token ids [T] with PENDING_TOKEN replaced; token_rows: [T]. All are int64."""
        last = self.last_tokens.index_select(0, token_rows)
        return torch.where(token_ids == PENDING_TOKEN, last, token_ids)


class QueuedStep:
    """A step in the device's queue whose tokens are copied to the host behind an event.

    owner: the runner that launched it. pending: where its tokens will stand in the batch.
    """

    def __init__(
        self,
        owner: AsyncModelRunner,
        forward: ForwardOutput,
        batch: InputBatch,
        positions: SampledPositions,
        pending: PendingTokens,
        logprobs: LogprobRequests,
        download: Download,
        device_time: "DeviceTime",
    ) -> None:
        self.is_ready = download.is_ready
        self._owner = owner
        self._is_resolved = False
        self._device_time = device_time
        self._seconds = 0.0
        self._forward = forward
        self._batch = batch
        self._positions = positions
        self._pending = pending
        self._logprobs = logprobs
        self._download = download
        self._arrays: StepArrays | None = None
        self._accepted: npt.NDArray[np.bool_] | None = None

    def wait_for_end(self) -> None:
        """Wait until the step has run; later calls do nothing."""
        if self._arrays is None:
            token_ids, best, nonfinite, *others = self._download.arrays()
            experts = None if self._forward.experts is None else others.pop()
            self._arrays = StepArrays(token_ids, best, nonfinite, others, experts)
            self._seconds = self._device_time.end_step(self._forward.started)

    def wait_for_tokens(self) -> None:
        """Wait for the tokens and write them into the batch; later calls do nothing."""
        if self._is_resolved:
            return
        self.wait_for_end()
        assert self._arrays is not None
        self._is_resolved = True
        token_ids = self._arrays.token_ids.astype(np.int64)
        self._accepted = self._positions.accepted(token_ids, np.isfinite(self._arrays.best))
        self._batch.resolve_pending(self._pending, token_ids, self._accepted)

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its answer; called in the order of the steps."""
        self.wait_for_tokens()
        arrays = self._arrays
        assert arrays is not None
        positions, inputs = self._positions, self._forward.inputs
        nonfinite = any_token_of_sequences(arrays.nonfinite.astype(np.bool_), inputs.query_start)
        nonfinite &= inputs.num_sampled <= 1
        nonfinite[positions.sequences[positions.first_of_rows(~np.isfinite(arrays.best))]] = True
        is_output = ~nonfinite[positions.sequences]
        if self._accepted is not None:
            is_output &= self._accepted
        sampled: list[list[int]] = [[] for _ in self._forward.seq_ids]
        for sequence, token_id in zip(
            positions.sequences[is_output].tolist(),
            arrays.token_ids[is_output].tolist(),
            strict=True,
        ):
            sampled[sequence].append(token_id)
        output = self._forward.answer(
            sampled,
            nonfinite=nonfinite,
            seconds=self._seconds,
            logprobs=self._pack_logprobs(arrays, is_output),
            experts=arrays.experts,
        )
        return self._owner.with_drafts(output, self._forward, sampled)

    def _pack_logprobs(
        self, arrays: "StepArrays", is_output: npt.NDArray[np.bool_]
    ) -> list[RowLogprobs]:
        """Return the log-probabilities of sampled positions whose tokens are outputs.

        is_output: bool [N], false for tokens of rejected drafts and of nonfinite logits.
        """
        requests, positions = self._logprobs, self._positions
        if not requests:
            return []
        packed = pack_logprobs(
            arrays.logprobs, requests.num_logprobs, requests.position, requests.named
        )
        return logprobs_of_sequences(
            (positions.seq_ids[index], arrays)
            for index, arrays in zip(requests.indices.tolist(), packed, strict=True)
            if is_output[index]
        )


class StepArrays(NamedTuple):
    """What a step sends to the host, flat.

    token_ids: int64 [N]. best: float32 [N], best logits. nonfinite: [T], of the step's tokens.
    logprobs: those of `queue_logprobs`; empty if no sequence requests some. experts: those of
    `ForwardOutput`; None if they are not recorded.
    """

    token_ids: npt.NDArray[np.int64]
    best: npt.NDArray[np.float32]
    nonfinite: npt.NDArray[np.generic]
    logprobs: list[npt.NDArray[Any]]
    experts: npt.NDArray[np.generic] | None


class DeviceTime:
    """The compute time of steps that are queued behind each other.

    The device begins a step when it was launched or when the step before has ended, whichever is
    later, so no time is counted twice.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_end = 0.0
        self._other_begin = self._other_end = 0.0

    def start_of(self, launched: float) -> float:
        """Return when the device began a step; all steps before it have ended."""
        return max(launched, self._last_end)

    def end_step(self, launched: float) -> float:
        """Return the seconds of a step that has just ended; called in the order of the steps."""
        start, end = self.start_of(launched), self._clock()
        self._last_end = end
        other = min(end, self._other_end) - max(start, self._other_begin)
        return end - start - max(0.0, other)

    def leave_out(self, begin: float) -> None:
        """Note that the device worked on something else than steps, from `begin` until now."""
        self._other_begin, self._other_end = begin, self._clock()
