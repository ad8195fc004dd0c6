"""Recurrent layers by the Triton kernels on a GPU: float64, bits of every step, and a graph."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.worker.layers.test_recurrences import (
    BLOCK,
    NUM_TOKENS,
    SHAPES,
    in_float64,
    inputs_of,
    log_of,
    rows_of,
    run,
    run_in_steps,
    verify_drafts,
    weights_of,
)
from worker.attention.kv_cache import StateShape
from worker.cuda.accelerator import Accelerator
from worker.cuda.layers.recurrence import TRITON_RECURRENCES
from worker.cuda.states import CudaStates
from worker.layers.delta_rule import DeltaRuleShape
from worker.layers.mamba2 import Mamba2Shape
from worker.layers.recurrence import Recurrence

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LARGE: dict[str, Any] = SHAPES | {
    "delta rule of Qwen3-Next": DeltaRuleShape(
        num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, num_taps=4
    ),
    "Mamba-2 of Granite 4": Mamba2Shape(
        num_heads=48, head_size=64, num_groups=1, state_size=128, num_taps=4
    ),
    "Mamba-2 of Nemotron-H": Mamba2Shape(
        num_heads=128, head_size=64, num_groups=8, state_size=128, num_taps=4
    ),
}


def cuda_states(shape: StateShape) -> CudaStates:
    def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=CUDA)

    return CudaStates(Accelerator(CUDA), shape, 40, BLOCK, zeros)


def rule_of(shape: Any) -> Recurrence:
    weights = weights_of(shape)
    given = {each.name: getattr(weights, each.name) for each in fields(weights)}
    there = {
        name: value.to(CUDA) for name, value in given.items() if isinstance(value, torch.Tensor)
    }
    return TRITON_RECURRENCES[type(shape)](shape, replace(weights, **there))


@pytest.mark.parametrize("name", LARGE)
def test_outputs_are_those_of_float64_and_do_not_depend_on_steps(name: str) -> None:
    shape = LARGE[name]
    rule, rows = rule_of(shape), rows_of(shape)
    there = rows.to(CUDA)
    whole = run_in_steps(rule, shape, there, [NUM_TOKENS], cuda_states)
    expected = in_float64(shape, weights_of(shape), rows)
    assert (whole.cpu().double() - expected).abs().max() < 2e-5 * expected.abs().max()
    for sizes in ([1] * NUM_TOKENS, [5, 7, 1, 24], [4, 4, 8, 16, 5], [2, 2, 33], [36, 1]):
        assert torch.equal(run_in_steps(rule, shape, there, sizes, cuda_states), whole), sizes
    verify_drafts(rule, shape, there, whole, cuda_states, num_lives=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["delta rule like Qwen", "Mamba-2 like Granite", "short convolution"]
)
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    rule, rows = rule_of(shape), rows_of(shape).to(CUDA, dtype)
    wide = run_in_steps(rule, shape, rows.float(), [NUM_TOKENS], cuda_states)
    half = run_in_steps(rule, shape, rows, [20, 17], cuda_states)
    assert half.dtype == dtype
    error = (half.double() - wide.double()).abs().max() / wide.abs().max()
    assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["delta rule of Qwen3-Next", "Mamba-2 of Granite 4"])
def test_a_graph_reads_the_plan_of_each_replay(name: str) -> None:
    """Decodes of other numbers of sequences, then rows of a draft, with the bits of one prompt."""
    shape = LARGE[name]
    rule, rows = rule_of(shape), rows_of(shape).to(CUDA)
    whole = run_in_steps(rule, shape, rows, [NUM_TOKENS], cuda_states)
    cache = log_of(shape, cuda_states)
    assert isinstance(cache, CudaStates)
    cache.plan_step(inputs_of([(0, 8), (0, 6)], [[1, 2], [11, 12]]))
    run(rule, shape, torch.cat((rows[:8], rows[:6])), cache, 1)
    cache.reserve_graphs(8)
    given = torch.zeros(8, rows.shape[1], device=CUDA)
    cache.plan_graph(inputs_of([(0, 1)] * 8, [[0]] * 8), 8)
    run(rule, shape, given, cache, 1)
    graph, out = Accelerator(CUDA).capture(lambda: run(rule, shape, given, cache, 1))
    tables = [[1, 2, 3, 4], [11, 12, 13, 14]]
    for chunks in (
        [(8, 9), (6, 7)],
        [(9, 10)],
        [(10, 14), (7, 8)],
        [(14, 15), (8, 9)],
    ):
        tokens = [token for first, end in chunks for token in range(first, end)]
        given[: len(tokens)] = rows[tokens]
        cache.plan_graph(inputs_of(chunks, tables[: len(chunks)]), 8)
        graph.replay()
        assert torch.equal(out[: len(tokens)], whole[tokens]), chunks
