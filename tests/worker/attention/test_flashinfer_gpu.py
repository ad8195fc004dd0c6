"""The FlashInfer backend on a GPU against float64, over the cases of the fake's tests.

The library compiles its kernels on first use, some minutes for all of them.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.attention.steps import LAYER, Step
from tests.worker.attention.test_flashinfer import (
    CASES,
    DECODES,
    MIXED,
    SHARING,
    case_of,
    sharing_two_pages,
)
from worker.attention.flashinfer import DEFAULTS, FlashInferAttention, create_flashinfer
from worker.attention.flashinfer_group import Options
from worker.attention.paged_batch import pad_decodes

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LONG_SLEEP = 50_000_000
"""Cycles: tens of milliseconds, many steps of the host."""


class OnGpu:
    """A step whose cache and tensors are the device's too."""

    def __init__(self, step: Step, options: Options = DEFAULTS) -> None:
        self.step = step
        self._cache = copy.copy(step.kv_cache)
        self._cache.buffer = step.kv_cache.buffer.to(CUDA)
        case = step.case
        self.backend: FlashInferAttention = create_flashinfer(
            self._cache, case.shape, case.dtype, options
        )
        parts = (step.query, step.key, step.value, step.rotation)
        self.parts = [each.to(CUDA) for each in parts]

    def run(self) -> torch.Tensor:
        """Queued, not waited for."""
        self.backend.plan(self.step.of_all_groups(self.step.inputs))
        return self.backend.run(LAYER, *self.parts)

    def expected(self) -> torch.Tensor:
        """float64, over what the device has written."""
        self.step.kv_cache.buffer.copy_(self._cache.buffer)
        return self.step.expected()


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    on_gpu = OnGpu(Step(CASES[name]))
    result = on_gpu.run().double().cpu()
    exact = on_gpu.expected()
    assert result.isfinite().all()
    assert (result - exact).norm() < 5e-3 * exact.norm()


def test_keys_and_values_of_eight_bits() -> None:
    on_gpu = OnGpu(Step(case_of(MIXED, kv_dtype=torch.float8_e4m3fn)))
    result = on_gpu.run().double().cpu()
    exact = on_gpu.expected()
    assert (result - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("name", SHARING)
def test_a_shared_prefix_gives_what_it_gives_alone(name: str) -> None:
    results = []
    for options in (DEFAULTS, Options(cascade_from=1)):
        on_gpu = OnGpu(Step(case_of(SHARING[name])), options)
        on_gpu.backend.plan([sharing_two_pages(on_gpu.step)])
        results.append(on_gpu.backend.run(LAYER, *on_gpu.parts).double())
    assert (results[1] - results[0]).norm() < 5e-3 * results[0].norm()


def test_plans_made_ahead_of_the_device_do_not_meet() -> None:
    on_gpu = OnGpu(Step(case_of(tuple((100 * n, 1 + n % 3) for n in range(1, 9)))))
    rows = [0, 7, 3, 5, 1, 6, 2, 4] * 5

    def run(row: int) -> torch.Tensor:
        step = on_gpu.step
        tokens = slice(*step.inputs.query_start[row : row + 2])
        on_gpu.backend.plan(step.of_all_groups(step.only(row)))
        return on_gpu.backend.run(LAYER, *(each[tokens] for each in on_gpu.parts))

    alone = {row: run(row).cpu() for row in rows}
    torch.cuda._sleep(LONG_SLEEP)
    results = [run(row) for row in rows]
    for row, result in zip(rows, results, strict=True):
        assert torch.equal(result.cpu(), alone[row])


def test_a_replayed_graph_reads_the_plan_of_the_moment() -> None:
    step = Step(case_of(tuple((before + 300, 1) for before, _ in DECODES)))
    on_gpu = OnGpu(step, Options(capture_sizes=(4,), capture_pages=256))
    parts = [torch.cat((each, torch.zeros_like(each[:1]))) for each in on_gpu.parts]
    long = pad_decodes(step.inputs, 4)
    short = replace(long, seq_lens=np.minimum(long.seq_lens, 9))
    for inputs in (long, short):
        on_gpu.backend.plan(step.of_all_groups(inputs))
        on_gpu.backend.run(LAYER, *parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = on_gpu.backend.run(LAYER, *parts)
    on_gpu.backend.plan(step.of_all_groups(long))
    graph.replay()
    result, exact = output[:3].double().cpu(), on_gpu.expected()
    assert (result - exact).norm() < 5e-3 * exact.norm()
    assert not output[3].any()
