"""Reads workloads from stdin and prints their timings, one JSON line each, until EOF.

A worker like the daemon's computes steps; a model is loaded once for all lines that name it.
"""

import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Final

import torch

from proto import PROTOCOL_VERSION
from proto.codec import from_json, to_json_line
from proto.messages.lifecycle import InitializeCache
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.prepared_model import PreparedModel
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import (
    BlockIds,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from proto.runtime.faults import FaultInjector
from proto.settings.config import ServeConfig
from tests.benchmarks.messages import StepTimings, StepWorkload
from tests.benchmarks.step_clock import ClockedModel, StepClock
from worker.create_device import create_device
from worker.host.device import HostDevice
from worker.loaded_model import load
from worker.parallel.group import RankGroup
from worker.runner_builder import RunnerBuilder
from worker.step.model_runner import ModelRunner

_EPOCH: Final = 1
_FIRST_TOKEN_ID: Final = 1000


class BenchWorker:
    """The model of a worker, its steps timed, without an engine and a supervisor."""

    def __init__(
        self,
        config: ServeConfig,
        prepared: PreparedModel,
    ) -> None:
        self.clock = StepClock()
        device = create_device(config, 0)

        def report(message: object) -> None:
            """Ignore progress and notices."""

        loaded = load(config, prepared, device, RankGroup(), report)
        self.loaded = replace(loaded, model=ClockedModel(loaded.model, self.clock))
        self._block_size = config.cache.block_size
        fault_injector = FaultInjector.of((), "worker", 0, 0)
        self._builder = RunnerBuilder(config, self.loaded, fault_injector, report, "")

    def runner(self, num_blocks: int, max_model_len: int, num_state_slots: int = 0) -> ModelRunner:
        """Return a model runner with its own KV cache."""
        message = InitializeCache(
            PROTOCOL_VERSION,
            _EPOCH,
            num_blocks,
            self._block_size,
            max_model_len,
            num_state_slots=num_state_slots,
        )
        device = self.loaded.device
        assert isinstance(device, HostDevice), "steps on a GPU have no ModelRunner to execute"
        return device.model_runner(self._builder.parts(message))


class Steps:
    """`num_rows` sequences whose prompts are computed in turn, or that decode together.

    blocks    | 0 | row 0, group 0 | row 0, group 1 | row 1, group 0 | …

    A row has one slot for its recurrent state; the others begin with zeros where row 0 ends.
    """

    def __init__(self, worker: BenchWorker, workload: StepWorkload) -> None:
        config = workload.config
        self._num_rows = workload.num_rows
        self._chunk = config.scheduler.step_tokens
        self._temperature = workload.temperature
        self._computed = workload.context_tokens
        length = workload.context_tokens + workload.warm_up_steps + workload.measured_steps + 1
        self._pages = -(-length // config.cache.block_size)
        layout = worker.loaded.layout
        self._groups, self._has_states = layout.num_block_groups, layout.states is not None
        num_blocks = 1 + self._num_rows * self._groups * self._pages
        num_slots = 1 + self._num_rows if self._has_states else 0
        self._runner = worker.runner(num_blocks, length, num_slots)
        self._step = 0
        self._prefill()

    def run_prompts(self) -> None:
        """Compute the context of every sequence again, chunk by chunk."""
        for row in range(self._num_rows):
            self._compute_context(row)

    def run_decodes(self) -> ModelRunnerOutput:
        """Run one step in which every sequence gets a token; return its output."""
        rows = self._num_rows
        cached = CachedRequestData(
            list(range(rows)), [self._computed] * rows, [1] * rows, [None] * rows
        )
        output = self._execute([], cached, rows)
        self._computed += 1
        return output

    def _prefill(self) -> None:
        """Compute the context of row 0; the others get copies of its blocks."""
        context = self._computed
        self._compute_context(0)
        first = self._blocks(0)
        pairs = [
            block
            for row in range(1, self._num_rows)
            for sources, copies in zip(first[: self._groups], self._blocks(row), strict=False)
            for pair in zip(sources, copies, strict=True)
            for block in pair
        ]
        others = [self._new(row, context - 1, 1) for row in range(1, self._num_rows)]
        self._execute(others, CachedRequestData(), len(others), pairs)

    def _compute_context(self, row: int) -> None:
        context = self._computed
        for start in range(0, context, self._chunk):
            count = min(self._chunk, context - start)
            if start == 0:
                self._execute([self._new(row, 0, count)], CachedRequestData(), count)
            else:
                self._execute([], CachedRequestData([row], [start], [count], [None]), count)

    def _blocks(self, row: int) -> BlockIds:
        firsts = [1 + (row * self._groups + group) * self._pages for group in range(self._groups)]
        tables = [list(range(first, first + self._pages)) for first in firsts]
        return [*tables, [1 + row] * self._pages] if self._has_states else tables

    def _new(self, row: int, num_computed: int, num_scheduled: int) -> NewRequestData:
        context = range(_FIRST_TOKEN_ID, _FIRST_TOKEN_ID + self._computed)
        return NewRequestData(
            seq_id=row,
            prompt_token_ids=[each % self._runner.vocab_size for each in context],
            output_token_ids=[],
            sampling_params=SamplingParams(max_tokens=1 << 20, temperature=self._temperature),
            seed=row,
            choice=0,
            block_ids=self._blocks(row),
            num_computed_tokens=num_computed,
            num_scheduled_tokens=num_scheduled,
        )

    def _execute(
        self,
        new: list[NewRequestData],
        cached: CachedRequestData,
        count: int,
        block_copies: Sequence[int] = (),
    ) -> ModelRunnerOutput:
        self._step += 1
        output = self._runner.execute(
            SchedulerOutput(
                epoch=_EPOCH,
                step=self._step,
                new_requests=new,
                cached_requests=cached,
                total_num_scheduled_tokens=count,
                finished_seq_ids=[],
                preempted_seq_ids=[],
                block_copies=list(block_copies),
            )
        )
        assert output.failed_seq_ids == [], "the logits are not finite"
        return output


def measure(worker: BenchWorker, workload: StepWorkload) -> StepTimings:
    """Run a workload: warm up, then measure."""
    steps = Steps(worker, workload)
    run = steps.run_prompts if workload.computes_prompts else steps.run_decodes
    for _ in range(workload.warm_up_steps):
        run()
    clock = worker.clock
    total, product, attention, rest = [], [], [], []
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(workload.measured_steps):
        clock.clear()
        started = perf_counter()
        run()
        total.append(perf_counter() - started)
        product.append(clock.product)
        attention.append(clock.attention)
        rest.append(total[-1] - clock.product - clock.attention)
    after = resource.getrusage(resource.RUSAGE_SELF)

    def milliseconds(of: Callable[[list[float]], float], samples: list[float]) -> float:
        return 1e3 * of(samples)

    median = statistics.median
    return StepTimings(
        device=worker.loaded.device.name,
        num_threads=torch.get_num_threads(),
        num_rows=workload.num_rows,
        context_tokens=workload.context_tokens,
        num_steps=workload.measured_steps,
        step_ms_median=milliseconds(median, total),
        step_ms_min=milliseconds(min, total),
        step_ms_p99=milliseconds(lambda each: sorted(each)[int(len(each) * 0.99)], total),
        product_ms_median=milliseconds(median, product),
        attention_ms_median=milliseconds(median, attention),
        rest_ms_median=milliseconds(median, rest),
        rest_ms_min=milliseconds(min, rest),
        rest_share_median=median(a / b for a, b in zip(rest, total, strict=True)),
        page_faults_a_step=(after.ru_minflt - before.ru_minflt) / workload.measured_steps,
        waits_a_step=(after.ru_nvcsw - before.ru_nvcsw) / workload.measured_steps,
    )


def main() -> None:
    """Run workloads until EOF."""
    loaded: list[tuple[object, BenchWorker]] = []
    for line in sys.stdin.buffer:
        workload = from_json(line, StepWorkload)
        key = (workload.config, workload.model)
        if not loaded or loaded[0][0] != key:
            loaded[:] = [(key, BenchWorker(workload.config, workload.model))]
        sys.stdout.buffer.write(to_json_line(measure(loaded[0][1], workload)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
