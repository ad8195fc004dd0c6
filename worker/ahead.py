"""Steps that are queued on a device before the tokens of the one before are known.

    host      launch 1 │ launch 2 │ tokens of 1 ─▶ engine │ launch 3 │ tokens of 2 …
    device             [ step 1 ][ step 2 ................ ][ step 3 …

Sampled tokens stay on the device, where the next step takes them from; their copies reach
the host behind an event. Until then a row holds PENDING in their place. A step with a row
that wants more than a token (log-probabilities, candidates of a beam, penalties and other edits of
its scores, a grammar) is sampled on the host, once everything before it has arrived.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput
from worker.batch.inputs import StepInputs
from worker.batch.rows import PENDING, Rows
from worker.device.accelerator import Accelerator
from worker.device.placement import OnDevice
from worker.device.results import Download, Results
from worker.finite import odd_tokens, sequences_of
from worker.model_runner import NO_MASKS, Begun, ModelRunner
from worker.sample.device_sampling import DeviceSampling, DrawnRows
from worker.sample.grammar_masks import MaskSource


class Launched(Protocol):
    """A step that was given to the device."""

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Its answer; waits. In the order of the steps."""
        ...


class Runner(Protocol):
    """What a worker gives its steps to."""

    def launch(self, step: SchedulerOutput, masks: MaskSource = NO_MASKS) -> Launched:
        """Take over a step; the next may be launched before this one is done.

        masks: of its constrained sequences, asked when there are logits.
        """
        ...


class Done:
    """Launched, and nothing to wait for."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput:
        return self._output


class AtOnce:
    """Runner that computes a step when it is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, step: SchedulerOutput, masks: MaskSource = NO_MASKS) -> Launched:
        """As the Protocol says."""
        return Done(self._runner.execute(step, masks))


class DeviceTokens:
    """TokenSource: the last sampled token of each row, on the device."""

    def __init__(self, accelerator: Accelerator, num_rows: int) -> None:
        self._last = accelerator.zeros(num_rows, torch.int64)

    def rows_of(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        """int64 [T], the row of each token."""
        return np.repeat(inputs.rows, np.diff(inputs.query_start))

    def fill(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As the Protocol says."""
        return torch.where(token_ids == PENDING, self._last.index_select(0, rows), token_ids)

    def keep(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Each of `rows` int64 [N] has got its token."""
        self._last.index_copy_(0, rows, token_ids)


class InFlight:
    """Launched, with its tokens on their way.

    sequences: int64 [N], those of the step that sampled. positions: int64 [N], where in
    their rows the tokens belong.
    """

    def __init__(
        self,
        begun: Begun,
        rows: Rows,
        sequences: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        download: Download,
    ) -> None:
        self.ready = download.ready
        self._begun = begun
        self._rows = rows
        self._sequences = sequences
        self._positions = positions
        self._download = download
        self._arrived: list[npt.NDArray[np.generic]] = []

    def settle(self) -> None:
        """Wait for the tokens and put them into their rows; later calls do nothing."""
        if self._arrived:
            return
        self._arrived = list(self._download.arrays())
        inputs, handles = self._begun.inputs, self._begun.handles
        self._rows.fill_in(
            [handles[at] for at in self._sequences.tolist()],
            inputs.rows[self._sequences],
            self._positions,
            self._arrived[0].astype(np.int64),
        )

    def result(self) -> ModelRunnerOutput:
        """As the Protocol says."""
        self.settle()
        token_ids, best, odd = self._arrived
        broken = sequences_of(torch.from_numpy(odd), self._begun.inputs.query_start)
        broken[self._sequences] |= ~np.isfinite(best)
        sampled: list[list[int]] = [[] for _ in self._begun.handles]
        for sequence, token_id in zip(self._sequences.tolist(), token_ids.tolist(), strict=True):
            if not broken[sequence]:
                sampled[sequence].append(token_id)
        return self._begun.output(sampled, broken, [], [], [])


class AheadRunner:
    """Runner over a ModelRunner whose model is on an accelerator."""

    def __init__(
        self,
        runner: ModelRunner,
        rows: Rows,
        tokens: DeviceTokens,
        accelerator: Accelerator,
        sampling: Callable[[OnDevice], DeviceSampling],
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._tokens = tokens
        self._placement = OnDevice(accelerator)
        self._results = Results(accelerator)
        self._sampling = sampling(OnDevice(accelerator))
        self._in_flight: list[InFlight] = []

    def launch(self, step: SchedulerOutput, masks: MaskSource = NO_MASKS) -> Launched:
        """As the Protocol says; waits only where a row wants more than a token."""
        begun = self._runner.begin(step)
        if not isinstance(begun, Begun):
            return Done(begun)
        inputs = begun.inputs
        if step.constrained_handles or not self._rows.token_only(inputs.rows).all():
            for each in self._in_flight:
                each.settle()
            self._in_flight.clear()
            return Done(self._runner.complete(begun, masks))
        launched = self._queue(begun)
        self._in_flight = [*self._in_flight[-1:], launched]
        return launched

    @torch.inference_mode()
    def _queue(self, begun: Begun) -> InFlight:
        inputs, rows = begun.inputs, self._rows
        sequences = inputs.samples.nonzero()[0]
        at = inputs.rows[sequences]
        odd = odd_tokens(begun.hidden)
        if len(at):
            scores = self._runner.scores(begun)
            best = scores.amax(dim=1).float()
            token_ids = self._sampling.tokens(scores, self._drawn(at))
            self._tokens.keep(self._placement.send([at])[0], token_ids)
        else:
            best, token_ids = odd.new_empty(0, dtype=torch.float32), odd.new_empty(0).long()
        download = self._results.send([token_ids, best, odd])
        return InFlight(begun, rows, sequences, rows.append_pending(at), download)

    def _drawn(self, at: npt.NDArray[np.int64]) -> DrawnRows:
        rows = self._rows
        position = rows.num_tokens[at] - rows.num_prompt_tokens[at]
        return DrawnRows(
            rows.temperature[at],
            rows.top_k[at],
            rows.top_p[at],
            rows.min_p[at],
            rows.seed[at],
            rows.choice[at],
            position.astype(np.uint32),
        )
