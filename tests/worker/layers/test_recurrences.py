"""Recurrent layers: against float64, and bit by bit however a sequence is cut into steps."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.fakes.devices import REFERENCE
from tests.worker.kernel_variants import LOADABLE, load_variant
from worker.attention.backend import AttentionInputs
from worker.attention.kv_cache import StateShape
from worker.attention.state_cache import StateCache, plan_states
from worker.cpu.kernels import Kernels
from worker.cpu.recurrence import KERNEL_RECURRENCES
from worker.layers.delta_rule import DeltaRuleShape, DeltaRuleWeights
from worker.layers.mamba2 import Mamba2Shape, Mamba2Weights
from worker.layers.recurrence import Recurrence
from worker.layers.scratch import ByteBuffer
from worker.layers.short_conv import ShortConvShape, ShortConvWeights

BLOCK = 4
NUM_TOKENS = 37
SHAPES: dict[str, Any] = {
    "delta rule like Qwen": DeltaRuleShape(
        num_key_heads=2, num_value_heads=4, key_size=16, value_size=16, num_taps=4
    ),
    "delta rule of odd sizes": DeltaRuleShape(
        num_key_heads=1, num_value_heads=3, key_size=7, value_size=40, num_taps=3
    ),
    "delta rule, tiled": DeltaRuleShape(
        num_key_heads=2, num_value_heads=6, key_size=8, value_size=8, num_taps=1, is_tiled=True
    ),
    "Mamba-2 like Granite": Mamba2Shape(
        num_heads=4, head_size=64, num_groups=1, state_size=16, num_taps=4
    ),
    "Mamba-2 of odd sizes": Mamba2Shape(
        num_heads=6, head_size=7, num_groups=3, state_size=5, num_taps=2
    ),
    "Mamba-2, norm before gate": Mamba2Shape(
        num_heads=2, head_size=40, num_groups=2, state_size=8, num_taps=1, gate_norm="gated norm"
    ),
    "Mamba-2 without a norm": Mamba2Shape(
        num_heads=2, head_size=16, num_groups=1, state_size=9, num_taps=3, gate_norm="none"
    ),
    "short convolution": ShortConvShape(channels=70, num_taps=3),
}


def weights_of(shape: Any) -> Any:
    """Return random weights of a layer, all of which change the result."""
    generator = torch.Generator().manual_seed(shape.num_inputs)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    taps = randn(shape.num_taps, shape.channels)
    if isinstance(shape, ShortConvShape):
        return ShortConvWeights(taps, randn(shape.channels))
    is_mamba = isinstance(shape, Mamba2Shape)
    heads = shape.num_heads if is_mamba else shape.num_value_heads
    decay, bias = -2 * torch.rand(heads, generator=generator), randn(heads)
    if not is_mamba:
        return DeltaRuleWeights(taps, decay, bias, 1 + 0.3 * randn(shape.value_size), 1e-5)
    norm = None if shape.gate_norm == "none" else 1 + 0.3 * randn(shape.inner)
    return Mamba2Weights(
        taps, randn(shape.channels), decay, bias, randn(heads), norm, 1e-5, 0.7, 1.3
    )


def rows_of(shape: Any, num_rows: int = NUM_TOKENS) -> torch.Tensor:
    """Return the projections of each token, side by side."""
    gates = 2 * shape.num_value_heads if isinstance(shape, DeltaRuleShape) else 0
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_rows, shape.num_inputs + gates, generator=generator)


def run(
    rule: Recurrence, shape: Any, rows: torch.Tensor, cache: StateCache, layer: int
) -> torch.Tensor:
    """Run a layer; its inputs are slices of wider rows."""
    if isinstance(shape, DeltaRuleShape):
        inputs = rows.tensor_split([shape.num_inputs], 1)
    else:
        inputs = (torch.cat((rows, rows[:, :3]), 1)[:, :-3],)
    return rule.run(inputs, cache, layer, ByteBuffer())


def in_float64(shape: Any, weights: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the definition, token after token, over all tokens of a sequence."""
    if isinstance(shape, DeltaRuleShape):
        return delta_rule_in_float64(shape, weights, rows.double())
    if isinstance(shape, Mamba2Shape):
        return mamba2_in_float64(shape, weights, rows.double())
    into, gates, x = rows.double().chunk(3, 1)
    return gates * (convolved(into * x, weights.taps) + weights.bias.double())


def convolved(inputs: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Return the causal depthwise convolution of inputs [T, channels]."""
    padded = torch.cat((inputs.new_zeros(len(taps) - 1, inputs.shape[1]), inputs))
    parts = padded.unfold(0, len(inputs), 1).unbind()
    return sum(tap * part.T for tap, part in zip(taps.double(), parts, strict=True))


def mamba2_in_float64(
    shape: Mamba2Shape, weights: Mamba2Weights, rows: torch.Tensor
) -> torch.Tensor:
    gates, inputs, times = rows.tensor_split([shape.inner, shape.inner + shape.channels], 1)
    mixed = F.silu(convolved(inputs, weights.taps) + weights.conv_bias.double())
    x, write, read = mixed.tensor_split([shape.inner, shape.inner + shape.group_states], 1)
    x = x.view(len(rows), shape.num_heads, shape.head_size)
    owner = torch.arange(shape.num_heads) // (shape.num_heads // shape.num_groups)
    write, read = (
        part.view(len(rows), shape.num_groups, shape.state_size)[:, owner] for part in (write, read)
    )
    times = F.softplus(times * weights.time_factor + weights.time_bias.double())
    state = torch.zeros(shape.num_heads, shape.head_size, shape.state_size).double()
    outputs = []
    for token in range(len(rows)):
        decay = (weights.decay.double() * times[token]).exp()
        added = torch.einsum("hp,hn,h->hpn", x[token], write[token], times[token])
        state = state * decay[:, None, None] + added
        outputs.append(torch.einsum("hpn,hn->hp", state, read[token]))
    output = torch.stack(outputs) + weights.skip.double()[:, None] * x
    gates = F.silu(gates * weights.gate_factor)

    def normed(rows: torch.Tensor) -> torch.Tensor:
        groups = rows.view(len(rows), shape.num_groups, -1)
        wide = F.rms_norm(groups, [groups.shape[2]], eps=weights.norm_eps).flatten(1)
        return wide * weights.norm.double()

    output = output.flatten(1)
    if shape.gate_norm == "none":
        return output * gates
    return normed(output * gates) if shape.gate_norm == "norm of gated" else normed(output) * gates


def delta_rule_in_float64(
    shape: DeltaRuleShape, weights: DeltaRuleWeights, wide: torch.Tensor
) -> torch.Tensor:
    rows = wide
    mixed = F.silu(convolved(wide[:, : shape.channels], weights.taps))
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


MakeCache = Callable[[StateShape], StateCache]
"""Makes states of 40 slots."""


def host_cache(shape: StateShape) -> StateCache:
    return StateCache(shape, 40, BLOCK)


def cache_of(shape: Any, make_cache: MakeCache = host_cache) -> StateCache:
    """A cache with NaN wherever nothing was written."""
    cache = make_cache(StateShape((5, shape.state_floats, shape.state_floats)))
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
    rule: Recurrence,
    shape: Any,
    rows: torch.Tensor,
    sizes: list[int],
    make_cache: MakeCache = host_cache,
) -> torch.Tensor:
    """Compute a sequence in steps; blocks have slots where a step ends, and before the last one."""
    cache, table = cache_of(shape, make_cache), [0] * 10
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


def rule_of(kernels: Kernels | None, shape: Any) -> Recurrence:
    weights = weights_of(shape)
    if kernels is None:
        return REFERENCE.recurrence(shape, weights)
    return KERNEL_RECURRENCES[type(shape)](kernels, shape, weights)


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_those_of_float64_and_do_not_depend_on_steps(
    name: str, kernels: Kernels | None
) -> None:
    shape = SHAPES[name]
    rule, rows = rule_of(kernels, shape), rows_of(shape)
    whole = run_in_steps(rule, shape, rows, [NUM_TOKENS])
    expected = in_float64(shape, weights_of(shape), rows)
    assert (whole.double() - expected).abs().max() < 1e-5 * expected.abs().max()
    halves = [[first, NUM_TOKENS - first] for first in range(1, NUM_TOKENS)]
    for sizes in ([1] * NUM_TOKENS, [5, 7, 1, 24], [4, 4, 8, 16, 5], [2, 2, 33], *halves):
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
    states = cache.of_layer(2)
    assert torch.equal(states[20], states[21])
    assert torch.equal(states[20], states[4])
    assert not states[4].isnan().any()
    others = (cache.of_layer(0), cache.of_layer(1))
    assert all(each.isnan().all() for each in others), "only one layer ran"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["delta rule like Qwen", "Mamba-2 like Granite", "short convolution"]
)
def test_half_precision_is_rounded_once(
    name: str, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    shape = SHAPES[name]
    rule, rows = rule_of(kernels, shape), rows_of(shape).to(dtype)
    wide = run_in_steps(rule, shape, rows.float(), [NUM_TOKENS])
    half = run_in_steps(rule, shape, rows, [20, 17])
    assert half.dtype == dtype
    assert torch.equal(half, wide.to(dtype))


def test_a_wide_output_of_half_precision_is_not_rounded(kernels: Kernels | None) -> None:
    shape = replace(SHAPES["Mamba-2 without a norm"], has_wide_output=True)
    rule, rows = rule_of(kernels, shape), rows_of(shape).bfloat16()
    wide = run_in_steps(rule, shape, rows.float(), [NUM_TOKENS])
    half = run_in_steps(rule, shape, rows, [20, 17])
    assert half.dtype == torch.float32
    assert torch.equal(half, wide)


def log_of(shape: Any, make_cache: MakeCache = host_cache, max_logged: int = 8) -> StateCache:
    """A cache whose states have logs, with NaN wherever nothing was written."""
    sizes = (5, *[shape.state_floats + max_logged * shape.logged_floats] * 2)
    cache = make_cache(StateShape(sizes, max_logged))
    cache.buffer[:, :-1] = float("nan")
    return cache


@pytest.mark.parametrize("name", SHAPES)
def test_verified_rows_have_the_same_bits_and_rejected_ones_leave_no_trace(
    name: str, kernels: Kernels | None
) -> None:
    """Steps with drafts of any length, of which any number is accepted, beside another sequence."""
    shape = SHAPES[name]
    rule, rows = rule_of(kernels, shape), rows_of(shape)
    whole = run_in_steps(rule, shape, rows, [NUM_TOKENS])
    verify_drafts(rule, shape, rows, whole, host_cache, num_lives=4)


def verify_drafts(
    rule: Recurrence,
    shape: Any,
    rows: torch.Tensor,
    whole: torch.Tensor,
    make_cache: MakeCache,
    num_lives: int,
) -> None:
    """Compare accepted rows with those of all tokens at once."""
    num_tokens = len(rows)
    random = np.random.default_rng(num_tokens + shape.channels)
    for _ in range(num_lives):
        cache, table = log_of(shape, make_cache), [0] * 12
        done, other = 0, 0
        while done < num_tokens:
            room = (max(done - 1, 0) // BLOCK + 2) * BLOCK if done else 6
            num_drafts = int(random.integers(0, min(room, num_tokens) - done))
            num_accepted = int(random.integers(0, num_drafts + 1))
            end = done + 1 + num_drafts
            for block in range(max(done - 1, 0) // BLOCK, (end - 1) // BLOCK + 1):
                table[block] = block + 1
            chunks, tables, drafts = [(done, end)], [table], [num_drafts]
            parts = [rows[done:end].clone()]
            parts[0][1 + num_accepted :] += 1.0
            if other < num_tokens:  # the same tokens without drafts
                chunks.append((other, other + 1))
                tables.append([20 + block for block in range(10)])
                drafts.append(0)
                parts.append(rows[other : other + 1])
                other += 1
            inputs = replace(inputs_of(chunks, tables), num_drafts=np.array(drafts, dtype=np.int32))
            cache.plan_step(inputs)
            outputs = run(rule, shape, torch.cat(parts), cache, 1)
            number = 1 + num_accepted
            assert torch.equal(outputs[:number], whole[done : done + number])
            assert torch.equal(
                outputs[len(parts[0]) :], whole[other - len(outputs) + end - done : other]
            )
            done += number


def test_a_plan_of_drafts_keeps_the_state_before_them_and_computes_accepted_ones_again() -> None:
    """The example of worker/attention/state_cache.py, over the end of a block."""
    positions = np.zeros(10, dtype=np.int32)
    positions[9] = 6
    inputs = inputs_of([(8, 12), (0, 3)], [[0, 9, 7], [5]])
    plan = plan_states(
        replace(inputs, num_drafts=np.array([3, 0], dtype=np.int32)), BLOCK, positions
    )
    assert plan.query_start.tolist() == [0, 4, 7]
    assert plan.token_start.tolist() == [0, 6, 9], "tokens 6 and 7 are computed again"
    assert plan.write_bases.tolist() == [1, 7]
    assert plan.write_ends.tolist() == [4, 7]
    assert plan.positions.tolist() == [9, 3]


def test_a_plan_reads_the_state_before_and_writes_those_that_have_a_slot() -> None:
    """The example of worker/attention/state_cache.py, beside a sequence that begins."""
    plan = plan_states(inputs_of([(6, 14), (0, 3)], [[0, 9, 0, 7], [5]]), BLOCK)
    assert plan.write_bases.tolist() == plan.write_ends.tolist()
    assert plan.positions.tolist() == [8, 14, 3]
    assert plan.sources.tolist() == [9, -1]
    assert plan.write_start.tolist() == [0, 2, 3]
    assert plan.write_ends.tolist() == [2, 8, 11]
    assert plan.write_slots.tolist() == [9, 7, 5]
    with pytest.raises(AssertionError, match="not kept"):
        plan_states(inputs_of([(4, 5)], [[0, 3]]), BLOCK)
