"""Steps that are queued on a device before the tokens of the step before are known.

    host      launch 1 │ launch 2 │ tokens of 1 ─▶ engine │ launch 3 │ tokens of 2 …
    device             [ step 1 ][ step 2 ................ ][ step 3 …

Sampled tokens stay on the device, where the next step reads them (DeviceTokens); their copies
reach the host behind an event, and until then the batch holds PENDING. Logits are edited and
log-probabilities computed on the device as well. Grammar masks depend on the tokens before, so the
host waits for them while the model computes. A step with beam candidates or prompt
log-probabilities is sampled on the host, when all steps before it have finished.

Which tokens of a draft were accepted is known on the host, with the tokens. The engine plans no
other step of the sequence before, so no later step in the queue depends on it.

A drafter in the worker runs when the answer of a step is collected (worker/speculation/drafter.py).
Its passes are queued behind the steps that were launched meanwhile, and waited for.

Start with `AsyncModelRunner.launch`.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from proto.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from worker.device.accelerator import Accelerator
from worker.device.transfers import DevicePlacement, Download, Downloader
from worker.input_batch import InputBatch, PendingTokens
from worker.model_runner import (
    NO_GRAMMARS,
    DeviceTokens,
    FinishedStep,
    ForwardOutput,
    GrammarMaskSource,
    ModelRunner,
    SyncModelRunner,
    any_token_of_sequences,
    no_grammars,
    nonfinite_tokens,
)
from worker.sampling.device_sampler import DeviceSampler, LogprobRequests
from worker.sampling.logprobs import logprobs_of_sequences, pack_logprobs
from worker.step_inputs import SampledPositions


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


class QueuedStep:
    """A step in the device's queue whose tokens are copied to the host behind an event.

    owner: the runner that launched it. pending: where its tokens will stand in the batch.
    """

    def __init__(
        self,
        owner: "AsyncModelRunner",
        forward: ForwardOutput,
        batch: InputBatch,
        positions: SampledPositions,
        pending: PendingTokens,
        logprobs: LogprobRequests,
        download: Download,
        device_time: DeviceTime,
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
        self._arrays: list[npt.NDArray[np.generic]] = []
        self._accepted: npt.NDArray[np.bool_] | None = None

    def wait_for_end(self) -> None:
        """Wait until the step has run; later calls do nothing."""
        if not self._arrays:
            self._arrays = list(self._download.arrays())
            self._seconds = self._device_time.end_step(self._forward.started)

    def wait_for_tokens(self) -> None:
        """Wait for the tokens and write them into the batch; later calls do nothing."""
        if self._is_resolved:
            return
        self.wait_for_end()
        self._is_resolved = True
        token_ids = self._arrays[0].astype(np.int64)
        self._accepted = self._positions.accepted(token_ids, np.isfinite(self._arrays[1]))
        self._batch.resolve_pending(self._pending, token_ids, self._accepted)

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its answer; called in the order of the steps."""
        self.wait_for_tokens()
        token_ids, best, nonfinite_by_token = self._arrays[:3]
        positions, inputs = self._positions, self._forward.inputs
        nonfinite = any_token_of_sequences(nonfinite_by_token.astype(np.bool_), inputs.query_start)
        nonfinite &= inputs.num_sampled <= 1
        nonfinite[positions.sequences[positions.first_of_rows(~np.isfinite(best))]] = True
        counts = ~nonfinite[positions.sequences]
        if self._accepted is not None:
            counts &= self._accepted
        sampled: list[list[int]] = [[] for _ in self._forward.seq_ids]
        for sequence, token_id in zip(
            positions.sequences[counts].tolist(), token_ids[counts].tolist(), strict=True
        ):
            sampled[sequence].append(token_id)
        logprobs = self._pack_logprobs(counts)
        experts = None if self._forward.experts is None else self._arrays[-1]
        output = self._forward.answer(sampled, nonfinite, logprobs, [], [], self._seconds, experts)
        return self._owner.with_drafts(output, self._forward, sampled)

    def _pack_logprobs(self, counts: npt.NDArray[np.bool_]) -> list[RowLogprobs]:
        """Return the log-probabilities of the positions that count, bool [N]."""
        requests, positions = self._logprobs, self._positions
        if not requests:
            return []
        packed = pack_logprobs(
            self._arrays[3:6], requests.num_logprobs, requests.position, requests.named
        )
        return logprobs_of_sequences(
            (positions.seq_ids[index], arrays)
            for index, arrays in zip(requests.at.tolist(), packed, strict=True)
            if counts[index]
        )


class HostSampledStep:
    """A step whose tokens were sampled on the host when it was launched.

    Its drafts are made when its answer is collected, behind those of the steps before.
    """

    def __init__(
        self,
        owner: "AsyncModelRunner",
        forward: ForwardOutput,
        output: ModelRunnerOutput,
        sampled: list[list[int]],
    ) -> None:
        self._owner = owner
        self._forward = forward
        self._output = output
        self._sampled = sampled

    def is_ready(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput:
        """Return the answer of the step; called in the order of the steps."""
        return self._owner.with_drafts(self._output, self._forward, self._sampled)


PendingStep = FinishedStep | HostSampledStep | QueuedStep
"""A launched step; `is_ready` and `result` are the same in all."""


class AsyncModelRunner:
    """Queues a step on an accelerator when it is launched; the next may be launched at once."""

    def __init__(
        self,
        runner: ModelRunner,
        tokens: DeviceTokens,
        accelerator: Accelerator,
        sampler: DeviceSampler,
    ) -> None:
        self._runner = runner
        self._batch = runner.batch
        self._tokens = tokens
        self._placement = DevicePlacement(accelerator)
        self._downloader = Downloader(accelerator)
        self._sampler = sampler
        self._in_flight: list[QueuedStep] = []
        self._device_time = DeviceTime()

    def launch(
        self, step: SchedulerOutput, get_grammars: GrammarMaskSource = no_grammars
    ) -> PendingStep:
        """Queue a step; wait for the device only if a result has to be computed on the host."""
        forward = self._runner.start_step(step)
        if isinstance(forward, ModelRunnerOutput):
            return FinishedStep(forward)
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

    def _finish_on_host(
        self, forward: ForwardOutput, get_grammars: GrammarMaskSource
    ) -> HostSampledStep:
        self._wait_for_tokens(self._in_flight)
        self._in_flight.clear()
        forward = replace(forward, started=self._device_time.start_of(forward.started))
        output, sampled = self._runner.finish_on_host(forward, get_grammars)
        self._device_time.end_step(forward.started)
        return HostSampledStep(self, forward, output, sampled)

    def _wait_for_tokens(self, steps: list[QueuedStep]) -> None:
        for step in steps:
            step.wait_for_tokens()

    @torch.inference_mode()
    def _queue_sampling(self, forward: ForwardOutput, grammars: GrammarOutput) -> QueuedStep:
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
            self,
            forward,
            self._batch,
            positions,
            pending,
            requests,
            download,
            self._device_time,
        )

    def _keep_last_tokens(self, positions: SampledPositions, token_ids: torch.Tensor) -> None:
        """Keep the token of each row's last position for the next step."""
        last = positions.last_of_rows()
        if last is None:
            (rows,) = self._placement.to_device([positions.rows])
        else:
            rows, index = self._placement.to_device([positions.rows[last], last])
            token_ids = token_ids.index_select(0, index)
        self._tokens.set_last(rows, token_ids)


Runner = SyncModelRunner | AsyncModelRunner
