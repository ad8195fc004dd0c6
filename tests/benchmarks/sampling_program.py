"""Reads workloads from stdin and prints their timings, one JSON line each, until EOF.

Measures a step between the logits of its rows and their tokens. The cases alternate step by step in
random order, so that other load and the content of CPU caches affect all of them.
"""

import statistics
import sys
from time import perf_counter

import numpy as np
import torch

from proto.codec import from_json, to_json_line
from proto.messages.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from proto.settings.config import DeviceConfig
from tests.benchmarks.messages import (
    SamplingCase,
    SamplingCaseTimings,
    SamplingTimings,
    SamplingWorkload,
)
from worker.batch.input_batch import InputBatch, build_inputs
from worker.cpu.device import CpuDevice
from worker.cpu.kernels import load_kernels
from worker.cpu.sampling import KernelBackend
from worker.sampling.sampler import Sampler
from worker.step.step_sampler import StepSampler

_BLOCK_SIZE = 16
_WARM_UP_STEPS = 10
_NO_GRAMMARS = GrammarOutput(0, 0, [], b"")


class SamplingSteps:
    """One case, whose rows get a token in each step."""

    def __init__(self, case: SamplingCase, workload: SamplingWorkload, sampler: Sampler) -> None:
        num_rows, context = len(case.rows), workload.context_tokens
        rng = np.random.default_rng(0)
        most = context + workload.num_steps + _WARM_UP_STEPS
        rows = InputBatch(num_rows, most, _BLOCK_SIZE)
        new = [
            NewRequestData(
                seq_id=row,
                prompt_token_ids=rng.integers(workload.vocab_size, size=context // 2).tolist(),
                output_token_ids=rng.integers(workload.vocab_size, size=context // 2).tolist(),
                sampling_params=params,
                seed=row,
                choice=0,
                block_ids=[list(range(-(-most // _BLOCK_SIZE)))],
                num_computed_tokens=context - 1,
                num_scheduled_tokens=1,
            )
            for row, params in enumerate(case.rows)
        ]
        step = SchedulerOutput(
            epoch=1,
            step=1,
            new_requests=new,
            cached_requests=CachedRequestData(),
            total_num_scheduled_tokens=num_rows,
            finished_seq_ids=[],
            preempted_seq_ids=[],
        )
        self._inputs = build_inputs(step, rows.apply(step), rows)
        self._sampler = StepSampler(rows, sampler)
        self._seq_ids = list(range(num_rows))
        dtype: torch.dtype = getattr(torch, workload.dtype)
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(num_rows, workload.vocab_size, generator=generator)
        for row, each in enumerate(new):  # the most frequent tokens, which penalties lower
            scores[row, each.output_token_ids[0]] = scores[row].max() + 0.01
        self._scores = scores.to(dtype)
        self._spent = torch.empty_like(self._scores)
        self.seconds: list[float] = []

    def run(self) -> None:
        """Sample once, from logits in the CPU caches, as after their computation."""
        self._spent.copy_(self._scores)
        broken = np.zeros(len(self._seq_ids), dtype=np.bool_)
        started = perf_counter()
        self._sampler.sample_step(
            self._inputs, self._seq_ids, self._spent, broken, lambda: _NO_GRAMMARS
        )
        self.seconds.append(perf_counter() - started)


@torch.inference_mode()
def play(workload: SamplingWorkload) -> SamplingTimings:
    """Measure one workload."""
    threads = CpuDevice(DeviceConfig(cpu_threads=workload.num_threads)).num_threads
    torch.set_num_threads(threads)
    kernels = load_kernels()
    sampler = Sampler(KernelBackend(kernels))
    steps = [SamplingSteps(case, workload, sampler) for case in workload.cases]
    order = np.random.default_rng(0)
    for _ in range(_WARM_UP_STEPS + workload.num_steps):
        for number in order.permutation(len(steps)):  # otherwise a case always follows the same one
            steps[number].run()
    times = [each.seconds[_WARM_UP_STEPS:] for each in steps]
    return SamplingTimings(
        kernels=kernels.variant,
        num_threads=threads,
        num_steps=workload.num_steps,
        cases=[
            SamplingCaseTimings(
                name=case.name,
                num_rows=len(case.rows),
                step_us_median=1e6 * statistics.median(seconds),
                step_us_min=1e6 * min(seconds),
                ratio_median=statistics.median(seconds) / statistics.median(times[0]),
                ratio_min=min(seconds) / min(times[0]),
            )
            for case, seconds in zip(workload.cases, times, strict=True)
        ],
    )


def main() -> None:
    """Run workloads until EOF."""
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(to_json_line(play(from_json(line, SamplingWorkload))))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
