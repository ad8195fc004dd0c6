"""Steps that are queued on a device before the tokens of the one before are known.

    host      launch 1 │ launch 2 │ tokens of 1 ─▶ engine │ launch 3 │ tokens of 2 …
    device             [ step 1 ][ step 2 ................ ][ step 3 …

Sampled tokens stay on the device, where the next step takes them from; their copies reach
the host behind an event. Until then a row holds PENDING in their place. Scores are edited and
log-probabilities are found on the device as well; masks of grammars are made from the tokens
before, so they are awaited while the model computes, and nothing waits for the device. A step
with candidates of a beam or log-probabilities of a prompt is sampled on the host, once everything
before it has arrived.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from proto.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from worker.device.accelerator import Accelerator
from worker.device.placement import OnDevice
from worker.device.results import Download, Results
from worker.input_batch import PENDING, InputBatch, StepInputs
from worker.model_runner import NO_GRAMMARS, NO_MASKS, ForwardOutput, ModelRunner
from worker.nonfinite import odd_tokens, sequences_of
from worker.sampling.device_sampler import DeviceSampler, LogprobRequests, pack_logprobs
from worker.sampling.grammar_masks import MaskSource


class PendingStep(Protocol):
    """A step that was given to the device."""

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Its answer; waits. In the order of the steps."""
        ...


class Runner(Protocol):
    """What a worker gives its steps to."""

    def launch(self, step: SchedulerOutput, masks: MaskSource = NO_MASKS) -> PendingStep:
        """Take over a step; the next may be launched before this one is done.

        masks: of its constrained sequences, asked when there are logits.
        """
        ...


class Done:
    """PendingStep, and nothing to wait for."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput:
        return self._output


class SyncModelRunner:
    """Runner that computes a step when it is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, step: SchedulerOutput, masks: MaskSource = NO_MASKS) -> PendingStep:
        """As the Protocol says."""
        return Done(self._runner.execute(step, masks))


class DeviceTokens:
    """TokenSource: the last sampled token of each row, on the device."""

    def __init__(self, accelerator: Accelerator, num_rows: int) -> None:
        self.last = accelerator.zeros(num_rows, torch.int64)

    def rows_of(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        """int64 [T], the row of each token."""
        return np.repeat(inputs.rows, np.diff(inputs.query_start))

    def fill(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As the Protocol says."""
        return torch.where(token_ids == PENDING, self.last.index_select(0, rows), token_ids)

    def keep(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Each of `rows` int64 [N] has got its token."""
        self.last.index_copy_(0, rows, token_ids)


class DeviceTime:
    """Times steps that are queued behind each other.

    The device begins with a step when it was launched or when the one before has ended, whichever
    is later; so the time of the one before is not counted twice.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended = 0.0

    def began(self, launched: float) -> float:
        """When the device came to a step, all before it having ended."""
        return max(launched, self._ended)

    def end(self, launched: float) -> float:
        """A step's tokens are here: seconds that it took. In the order of the steps."""
        began, self._ended = self.began(launched), self._clock()
        return self._ended - began


class InFlight:
    """PendingStep, with its tokens on their way.

    sequences: int64 [N], those of the step that sampled. positions: int64 [N], where in
    their rows the tokens belong. logprobs: of which of them those are on their way too.
    """

    def __init__(
        self,
        begun: ForwardOutput,
        rows: InputBatch,
        sequences: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logprobs: LogprobRequests,
        download: Download,
        device_time: DeviceTime,
    ) -> None:
        self.ready = download.ready
        self._device_time = device_time
        self._seconds = 0.0
        self._begun = begun
        self._rows = rows
        self._sequences = sequences
        self._positions = positions
        self._logprobs = logprobs
        self._download = download
        self._arrived: list[npt.NDArray[np.generic]] = []

    def settle(self) -> None:
        """Wait for the tokens and put them into their rows; later calls do nothing."""
        if self._arrived:
            return
        self._arrived = list(self._download.arrays())
        self._seconds = self._device_time.end(self._begun.started)
        inputs, seq_ids = self._begun.inputs, self._begun.seq_ids
        self._rows.fill_in(
            [seq_ids[at] for at in self._sequences.tolist()],
            inputs.rows[self._sequences],
            self._positions,
            self._arrived[0].astype(np.int64),
        )

    def result(self) -> ModelRunnerOutput:
        """As the Protocol says."""
        self.settle()
        token_ids, best, odd = self._arrived[:3]
        broken = sequences_of(torch.from_numpy(odd), self._begun.inputs.query_start)
        broken[self._sequences] |= ~np.isfinite(best)
        sampled: list[list[int]] = [[] for _ in self._begun.seq_ids]
        for sequence, token_id in zip(self._sequences.tolist(), token_ids.tolist(), strict=True):
            if not broken[sequence]:
                sampled[sequence].append(token_id)
        logprobs = self._packed_logprobs(broken)
        return self._begun.output(sampled, broken, logprobs, [], [], self._seconds)

    def _packed_logprobs(self, broken: npt.NDArray[np.bool_]) -> list[RowLogprobs]:
        wanted = self._logprobs
        if not wanted:
            return []
        packed = pack_logprobs(
            self._arrived[3:], wanted.num_logprobs, wanted.position, wanted.named
        )
        return [
            RowLogprobs(self._begun.seq_ids[sequence], arrays)
            for sequence, arrays in zip(self._sequences[wanted.at].tolist(), packed, strict=True)
            if not broken[sequence]
        ]


class AsyncModelRunner:
    """Runner over a ModelRunner whose model is on an accelerator."""

    def __init__(
        self,
        runner: ModelRunner,
        rows: InputBatch,
        tokens: DeviceTokens,
        accelerator: Accelerator,
        sampler: DeviceSampler,
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._tokens = tokens
        self._placement = OnDevice(accelerator)
        self._results = Results(accelerator)
        self._sampler = sampler
        self._in_flight: list[InFlight] = []
        self._device_time = DeviceTime()

    def launch(self, step: SchedulerOutput, masks: MaskSource = NO_MASKS) -> PendingStep:
        """As the Protocol says; waits for the device only where a row wants what the host makes."""
        begun = self._runner.begin(step)
        if not isinstance(begun, ForwardOutput):
            return Done(begun)
        inputs = begun.inputs
        if self._rows.need_host(inputs.rows, inputs.num_computed).any():
            self._settle(self._in_flight)
            self._in_flight.clear()
            begun = replace(begun, started=self._device_time.began(begun.started))
            output = self._runner.complete(begun, masks)
            self._device_time.end(begun.started)
            return Done(output)
        grammars = masks.masks_of(step) if step.constrained_seq_ids else NO_GRAMMARS
        # Edits of scores allow for one token that is not known, that of the step before.
        self._settle(self._in_flight[:-1])
        launched = self._queue(begun, grammars)
        self._in_flight = [*self._in_flight[-1:], launched]
        return launched

    def _settle(self, launched: list[InFlight]) -> None:
        for each in launched:
            each.settle()

    @torch.inference_mode()
    def _queue(self, begun: ForwardOutput, grammars: GrammarOutput) -> InFlight:
        inputs, rows = begun.inputs, self._rows
        sequences = inputs.samples.nonzero()[0]
        at = inputs.rows[sequences]
        seq_ids = [begun.seq_ids[each] for each in sequences.tolist()]
        odd = odd_tokens(begun.hidden)
        wanted = self._sampler.logprobs_of(at, seq_ids)
        logprobs: list[torch.Tensor] = []
        if len(at):
            scores = self._runner.scores(begun)
            best = scores.amax(dim=1).float()
            token_ids, logprobs = self._sampler.sample(scores, at, seq_ids, grammars, wanted)
            self._tokens.keep(self._placement.send([at])[0], token_ids)
        else:
            best, token_ids = odd.new_empty(0, dtype=torch.float32), odd.new_empty(0).long()
        download = self._results.send([token_ids, best, odd, *logprobs])
        positions = rows.append_pending(at)
        return InFlight(begun, rows, sequences, positions, wanted, download, self._device_time)
