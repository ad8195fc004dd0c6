"""Gated delta-rule layers: against float64, and bit by bit however a sequence is cut into steps."""

from itertools import accumulate

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.worker.kernel_variants import LOADABLE, load_variant
from worker.attention.base import AttentionInputs
from worker.kernels import Kernels
from worker.kv_cache import StateShape
from worker.layers.delta_rule import (
    DeltaRule,
    DeltaRuleShape,
    DeltaRuleWeights,
    KernelDeltaRule,
    TorchDeltaRule,
)
from worker.layers.scratch import ByteBuffer
from worker.state_cache import StateCache, plan_states

BLOCK = 4
NUM_TOKENS = 37
SHAPES = {
    "like Qwen": DeltaRuleShape(
        num_key_heads=2, num_value_heads=4, key_size=16, value_size=16, num_taps=4
    ),
    "odd sizes": DeltaRuleShape(
        num_key_heads=1, num_value_heads=3, key_size=7, value_size=40, num_taps=3
    ),
    "tiled": DeltaRuleShape(
        num_key_heads=2, num_value_heads=6, key_size=8, value_size=8, num_taps=1, is_tiled=True
    ),
}


def weights_of(shape: DeltaRuleShape) -> DeltaRuleWeights:
    generator = torch.Generator().manual_seed(shape.value_size)
    heads = shape.num_value_heads
    return DeltaRuleWeights(
        torch.randn(shape.num_taps, shape.channels, generator=generator),
        -2 * torch.rand(heads, generator=generator),
        torch.randn(heads, generator=generator),
        1 + 0.3 * torch.randn(shape.value_size, generator=generator),
        1e-5,
    )


def rows_of(shape: DeltaRuleShape, num_rows: int = NUM_TOKENS) -> torch.Tensor:
    """Return q ‖ k ‖ v ‖ z ‖ b ‖ a of each token."""
    columns = shape.num_inputs + 2 * shape.num_value_heads
    return torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(5))


def run(
    rule: DeltaRule, shape: DeltaRuleShape, rows: torch.Tensor, cache: StateCache, layer: int
) -> torch.Tensor:
    """Run a layer; both inputs are slices of wider rows."""
    inputs, gates = rows.tensor_split([shape.num_inputs], 1)
    return rule.run(inputs, gates, cache, layer, ByteBuffer())


def in_float64(
    shape: DeltaRuleShape, weights: DeltaRuleWeights, rows: torch.Tensor
) -> torch.Tensor:
    """The definition, token after token, over all tokens of a sequence."""
    wide = rows.double()
    before = torch.zeros(shape.num_taps - 1, shape.channels, dtype=torch.float64)
    inputs = torch.cat((before, wide[:, : shape.channels]))
    taps = zip(weights.taps.double(), inputs.unfold(0, len(rows), 1).unbind(), strict=True)
    mixed = F.silu(sum(tap * part.T for tap, part in taps))
    query, key, value = mixed.tensor_split([shape.keys, 2 * shape.keys], 1)
    strength, time = wide[:, shape.num_inputs :].chunk(2, 1)
    decay = (weights.decay.double() * F.softplus(time + weights.time_bias.double())).exp()
    num_each = shape.num_value_heads // shape.num_key_heads
    heads = torch.arange(shape.num_value_heads)
    owner = heads % shape.num_key_heads if shape.is_tiled else heads // num_each

    def unit(part: torch.Tensor) -> torch.Tensor:
        part = part.view(len(rows), shape.num_key_heads, shape.key_size)
        return (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt())[:, owner]

    query, key = unit(query) / shape.key_size**0.5, unit(key)
    value = value.view(len(rows), shape.num_value_heads, shape.value_size)
    state = torch.zeros(shape.num_value_heads, shape.key_size, shape.value_size).double()
    outputs = []
    for token in range(len(rows)):
        state = state * decay[token, :, None, None]
        seen = torch.einsum("hkv,hk->hv", state, key[token])
        correction = (value[token] - seen) * strength[token].sigmoid()[:, None]
        state = state + key[token, :, :, None] * correction[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, query[token]))
    output = torch.stack(outputs)
    gate = wide[:, shape.channels : shape.num_inputs].view_as(output)
    normed = F.rms_norm(output, [shape.value_size], weights.norm.double(), weights.norm_eps)
    return (normed * F.silu(gate)).flatten(1)


def cache_of(shape: DeltaRuleShape) -> StateCache:
    """A cache with NaN wherever nothing was written."""
    cache = StateCache(StateShape(3, shape.state_floats), 40, BLOCK)
    cache.buffer.fill_(float("nan"))
    return cache


def inputs_of(chunks: list[tuple[int, int]], tables: list[list[int]]) -> AttentionInputs:
    """chunks: first position and end of each sequence."""
    counts = [end - first for first, end in chunks]
    start = np.array([0, *accumulate(counts)], dtype=np.int32)
    ends = np.array([end for _, end in chunks], dtype=np.int32)
    width = max(map(len, tables))
    table = np.array([[*row, *[0] * (width - len(row))] for row in tables], dtype=np.int32)
    return AttentionInputs(start, ends, table, np.zeros(start[-1], dtype=np.int64))


def run_in_steps(
    rule: DeltaRule, shape: DeltaRuleShape, rows: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Compute a sequence in steps; blocks have slots where a step ends, and before the last one."""
    cache, table = cache_of(shape), [0] * 10
    outputs, first = [], 0
    for size in sizes:
        end = first + size
        last = (end - 1) // BLOCK
        table[last] = last + 1
        if last and last % 2:
            table[last - 1] = last
        cache.plan_step(inputs_of([(first, end)], [table]))
        outputs.append(run(rule, shape, rows[first:end], cache, 1))
        first = end
    return torch.cat(outputs)


@pytest.fixture(params=[*LOADABLE, None], ids=lambda each: each.name if each else "torch")
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    return None if request.param is None else load_variant(request.param)


def rule_of(kernels: Kernels | None, shape: DeltaRuleShape) -> DeltaRule:
    weights = weights_of(shape)
    if kernels is None:
        return TorchDeltaRule(shape, weights)
    return KernelDeltaRule(kernels, shape, weights)


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_those_of_float64_and_do_not_depend_on_steps(
    name: str, kernels: Kernels | None
) -> None:
    shape = SHAPES[name]
    rule, rows = rule_of(kernels, shape), rows_of(shape)
    whole = run_in_steps(rule, shape, rows, [NUM_TOKENS])
    expected = in_float64(shape, weights_of(shape), rows)
    assert (whole.double() - expected).abs().max() < 1e-5 * expected.abs().max()
    for sizes in ([1] * NUM_TOKENS, [5, 7, 1, 24], [4, 4, 8, 16, 5], [36, 1], [2, 2, 33]):
        assert torch.equal(run_in_steps(rule, shape, rows, sizes), whole), sizes


@pytest.mark.parametrize("name", SHAPES)
def test_a_sequence_has_the_same_bits_with_others_and_from_each_held_state(
    name: str, kernels: Kernels | None
) -> None:
    shape = SHAPES[name]
    rule, rows = rule_of(kernels, shape), rows_of(shape)
    alone = run_in_steps(rule, shape, rows, [NUM_TOKENS])
    cache = cache_of(shape)
    held = {3: 1, 7: 2, 8: 3}
    table = [held.get(block, 0) for block in range(9)] + [4]
    cache.plan_step(inputs_of([(0, NUM_TOKENS), (0, 22)], [table, [0] * 5 + [9]]))
    both = run(rule, shape, torch.cat((rows, rows[:22])), cache, 2)
    assert torch.equal(both, torch.cat((alone, alone[:22])))
    # Three sequences go on from the states of the first one, two of them from the same.
    chunks = [((block + 1) * BLOCK, NUM_TOKENS) for block in (3, 7, 7)]
    tables = [[0] * block + [held[block]] for block in (3, 7, 7)]
    tables = [row + [0] * (9 - len(row)) + [20 + number] for number, row in enumerate(tables)]
    cache.plan_step(inputs_of(chunks, tables))
    parts = [rows[first:] for first, _ in chunks]
    again = run(rule, shape, torch.cat(parts), cache, 2)
    assert torch.equal(again, torch.cat([alone[first:] for first, _ in chunks]))
    assert torch.equal(cache.buffer[20, 2], cache.buffer[21, 2])
    assert torch.equal(cache.buffer[20, 2], cache.buffer[4, 2])
    assert cache.buffer[:, [0, 1]].isnan().all(), "only one layer ran"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype, kernels: Kernels | None) -> None:
    shape = SHAPES["like Qwen"]
    rule, rows = rule_of(kernels, shape), rows_of(shape).to(dtype)
    wide = run_in_steps(rule, shape, rows.float(), [NUM_TOKENS])
    half = run_in_steps(rule, shape, rows, [20, 17])
    assert half.dtype == dtype
    assert torch.equal(half, wide.to(dtype))


def test_a_plan_reads_the_state_before_and_writes_those_that_have_a_slot() -> None:
    """The example of worker/state_cache.py, beside a sequence that begins."""
    plan = plan_states(inputs_of([(6, 14), (0, 3)], [[0, 9, 0, 7], [5]]), BLOCK)
    assert plan.sources.tolist() == [9, -1]
    assert plan.write_start.tolist() == [0, 2, 3]
    assert plan.write_ends.tolist() == [2, 8, 11]
    assert plan.write_slots.tolist() == [9, 7, 5]
    with pytest.raises(AssertionError, match="not kept"):
        plan_states(inputs_of([(4, 5)], [[0, 3]]), BLOCK)
