"""Recurrent layers by the Triton kernels, in the interpreter: float64, and bits of every step.

Few tokens, because the interpreter is slow.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.devices import REFERENCE
from tests.fakes.triton import interpret_kernels
from tests.worker.layers.test_recurrences import (
    BLOCK,
    SHAPES,
    cache_of,
    in_float64,
    inputs_of,
    log_of,
    rows_of,
    run,
    run_in_steps,
    verify_drafts,
    weights_of,
)
from tests.worker.sampling.test_device_edits import HostAccelerator
from worker.attention.kv_cache import StateShape
from worker.cuda.layers.recurrence import TRITON_RECURRENCES
from worker.cuda.states import CudaStates
from worker.layers.recurrence import Recurrence

pytestmark = pytest.mark.suite("devices")

NUM_TOKENS = 9


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)


def cuda_states(shape: StateShape) -> CudaStates:
    accelerator: Any = HostAccelerator()

    def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    return CudaStates(accelerator, shape, 40, BLOCK, zeros)


def rule_of(shape: Any) -> Recurrence:
    return TRITON_RECURRENCES[type(shape)](shape, weights_of(shape))


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_those_of_float64_and_do_not_depend_on_steps(name: str) -> None:
    shape = SHAPES[name]
    rule, rows = rule_of(shape), rows_of(shape, NUM_TOKENS)
    whole = run_in_steps(rule, shape, rows, [NUM_TOKENS], cuda_states)
    expected = in_float64(shape, weights_of(shape), rows)
    assert (whole.double() - expected).abs().max() < 1e-5 * expected.abs().max()
    reference = REFERENCE.recurrence(shape, weights_of(shape))
    of_reference = run_in_steps(reference, shape, rows, [NUM_TOKENS])
    assert (whole - of_reference).abs().max() < 1e-5 * expected.abs().max()
    for sizes in ([1] * NUM_TOKENS, [2, 5, 2]):
        found = run_in_steps(rule, shape, rows, sizes, cuda_states)
        assert torch.equal(found, whole), sizes


@pytest.mark.parametrize("name", SHAPES)
def test_verified_rows_have_the_same_bits_and_rejected_ones_leave_no_trace(name: str) -> None:
    shape = SHAPES[name]
    rule, rows = rule_of(shape), rows_of(shape, NUM_TOKENS)
    whole = run_in_steps(rule, shape, rows, [NUM_TOKENS], cuda_states)
    verify_drafts(rule, shape, rows, whole, cuda_states, num_lives=1)


@pytest.mark.parametrize(
    "name", ["delta rule of odd sizes", "Mamba-2 of odd sizes", "short convolution"]
)
def test_sequences_have_the_bits_of_each_alone_also_in_a_graph_of_more_rows(name: str) -> None:
    """From held states, two of them from the same; slots of no sequence keep their numbers."""
    shape = SHAPES[name]
    rule, rows = rule_of(shape), rows_of(shape, NUM_TOKENS)
    alone = run_in_steps(rule, shape, rows, [NUM_TOKENS], cuda_states)
    cache = cache_of(shape, cuda_states)
    assert isinstance(cache, CudaStates)
    cache.plan_step(inputs_of([(0, 7), (0, 2)], [[1, 2], [9]]))
    both = run(rule, shape, torch.cat((rows[:7], rows[:2])), cache, 2)
    assert torch.equal(both, torch.cat((alone[:7], alone[:2])))
    # Decodes of three sequences in a graph of five rows: the last two are padding.
    cache.copy_slots([2], [5])
    inputs = inputs_of([(4, 5), (7, 8), (2, 3)], [[1, 3], [0, 5], [9]])
    padding = torch.full((2, rows.shape[1]), 3.0)
    wide = torch.cat((rows[[4, 7, 2]], padding))
    cache.reserve_graphs(8)
    cache.plan_graph(inputs, 5)
    before = cache.buffer.clone()
    found = run(rule, shape, wide, cache, 2)
    assert torch.equal(found[:3], alone[[4, 7, 2]])
    assert not found[3:].any()
    changed = [slot for slot in range(40) if not bits_equal(cache.buffer[slot], before[slot])]
    assert changed == [3, 5, 9]
    assert cache.of_layer(1).isnan().all(), "only one layer ran"


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("name", ["delta rule, tiled", "Mamba-2 without a norm"])
def test_half_precision_is_rounded_once(name: str) -> None:
    shape = SHAPES[name]
    rule, rows = rule_of(shape), rows_of(shape, NUM_TOKENS).half()
    wide = run_in_steps(rule, shape, rows.float(), [NUM_TOKENS], cuda_states)
    half = run_in_steps(rule, shape, rows, [5, 4], cuda_states)
    assert half.dtype == torch.float16
    assert torch.equal(half, wide.half())


def test_a_wide_output_of_half_precision_is_not_rounded() -> None:
    shape = replace(SHAPES["Mamba-2 without a norm"], has_wide_output=True)
    rule, rows = rule_of(shape), rows_of(shape, NUM_TOKENS).half()
    wide = run_in_steps(rule, shape, rows.float(), [NUM_TOKENS], cuda_states)
    half = run_in_steps(rule, shape, rows, [5, 4], cuda_states)
    assert half.dtype == torch.float32
    assert torch.equal(half, wide)


def test_a_copied_or_loaded_slot_brings_its_position() -> None:
    """The state after a draft's base, with a log; the host knows nothing of the slot."""
    shape = SHAPES["short convolution"]
    rule, rows = rule_of(shape), rows_of(shape, NUM_TOKENS)
    whole = run_in_steps(rule, shape, rows, [NUM_TOKENS], cuda_states)
    cache = log_of(shape, cuda_states)
    drafted = replace(inputs_of([(0, 6)], [[1, 2]]), num_drafts=np.array([3], dtype=np.int32))
    cache.plan_step(drafted)
    run(rule, shape, rows[:6], cache, 1)
    other = log_of(shape, cuda_states)
    other.block_rows()[7] = cache.block_rows()[2]
    other.copy_slots([7], [8])
    other.plan_step(inputs_of([(5, 9)], [[0, 8, 9]]))
    assert torch.equal(run(rule, shape, rows[5:], other, 1), whole[5:])
