"""Adapters in slots by the Triton kernels, in the interpreter: float64, and bits of every batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.fakes.triton import interpret_kernels
from tests.worker.reference.low_rank import expected, packed, random_update
from tests.worker.sampling.test_device_edits import HostAccelerator
from worker.cuda.layers.adapter_slots import ROWS, SPLIT_INPUTS, SlotAdapters, sorted_rows
from worker.layers.adapters import (
    AdaptedLinear,
    AdaptedProduct,
    AdaptedWeight,
    Adapter,
    AdapterRows,
    LowRankPart,
    LowRankUpdate,
    StepAdapters,
)
from worker.layers.linear import DenseLinear

pytestmark = pytest.mark.suite("devices")

BF16 = torch.bfloat16
SHAPES = (
    (64, ((16, 64),)),
    (SPLIT_INPUTS + 72, ((4, 70), (64, 24), (9, 33))),
    (33, ((3, 7), (5, 40), (17, 18))),
)
"""Inputs, and rank and outputs of each weight of a product."""
ERRORS = {torch.float32: 1e-5, torch.float16: 0.003}
"""The interpreter has no matrix products of bfloat16."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)


def slots_for(
    num_inputs: int, outputs: Sequence[int], dtype: torch.dtype, max_adapters: int = 4
) -> SlotAdapters:
    """Return slots for one product of weights with these outputs."""
    weights, first = [], 0
    for count in outputs:
        weights.append(AdaptedWeight(range(first, first + count), num_inputs))
        first += count
    accelerator: Any = HostAccelerator()
    adapters = SlotAdapters(lambda: accelerator)
    adapters.num_products = 1
    adapters.reserve([AdaptedProduct(first, weights)], max_adapters, 64, dtype)
    return adapters


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", ERRORS)
def test_sums_are_those_of_float64(dtype: torch.dtype, shape: int) -> None:
    """Of rows in any order, a stride apart, with DoRA and without; other rows keep their bits."""
    num_inputs, parts = SHAPES[shape]
    adapters = slots_for(num_inputs, [outputs for _, outputs in parts], dtype)
    num_outputs = sum(outputs for _, outputs in parts)
    x = random(45, num_inputs + 8, dtype=dtype)[:, :num_inputs]
    y = random(45, num_outputs + 8, dtype=dtype)[:, :num_outputs]
    order = torch.randperm(45, generator=torch.Generator().manual_seed(shape))
    before, wanted, groups = y.clone(), y.double().clone(), []
    for part, rows in enumerate((order[:1], order[1:3], order[3:20], order[20:40])):
        rows = rows.sort().values
        scales = torch.rand(len(rows), generator=torch.Generator().manual_seed(part)) + 0.5
        update = random_update(num_inputs, parts, dtype, part, scales_outputs=bool(part % 2))
        wanted[rows] = expected(update, x[rows], y[rows], scales)
        groups.append(AdapterRows(packed(adapters, update), rows, scales))
    with adapters.running(groups):
        adapters.add(0, x, y)
    assert (y.double() - wanted).abs().max() < ERRORS[dtype] * wanted.abs().max()
    assert torch.equal(y[order[40:]], before[order[40:]])


def test_sums_are_those_of_the_reference_device() -> None:
    """Whose products add the same updates one adapter after the other, in plain torch."""
    num_inputs, parts = SHAPES[1]
    adapters, reference = slots_for(num_inputs, [70, 24, 33], torch.float32), StepAdapters()
    x, y = random(30, num_inputs), random(30, 127)
    here, there = y.clone(), y.clone()
    groups: list[list[AdapterRows]] = [[], []]
    for seed in range(3):
        update = random_update(num_inputs, parts, torch.float32, seed, scales_outputs=seed == 1)
        rows, scales = torch.arange(seed, 30, 4), torch.full((len(range(seed, 30, 4)),), 0.7)
        groups[0].append(AdapterRows(packed(adapters, update), rows, scales))
        groups[1].append(AdapterRows(Adapter(products={0: update}), rows, scales))
    with adapters.running(groups[0]), reference.running(groups[1]):
        adapters.add(0, x, here)
        reference.add(0, x, there)
    assert (here - there).abs().max() < 1e-4
    assert (there - y).abs().max() > 0.5


@pytest.mark.parametrize("dtype", ERRORS)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    """Alone, among others in any order, and in whichever slot its adapter is."""
    num_inputs, parts = SHAPES[1]
    adapters = slots_for(num_inputs, [70, 24, 33], dtype, max_adapters=2)
    owners = [
        packed(adapters, random_update(num_inputs, parts, dtype, seed, scales_outputs=seed == 1))
        for seed in (1, 2, 3)
    ]
    x, y = random(38, num_inputs, dtype=dtype), random(38, 127, dtype=dtype)

    def compute(rows: torch.Tensor, owner_of: torch.Tensor) -> torch.Tensor:
        after = y[rows].clone()
        groups = []
        for number in owner_of.unique().tolist():
            own = torch.nonzero(owner_of == number)[:, 0]
            groups.append(AdapterRows(owners[number], own, torch.full((len(own),), 0.5)))
        with adapters.running(groups):
            adapters.add(0, x[rows], after)
        return after

    all_rows = torch.arange(38)
    whole = compute(all_rows, all_rows % 2)
    assert not torch.equal(whole, y)
    order = all_rows.flip(0)
    assert torch.equal(compute(order, order % 2), whole[order])
    compute(all_rows[:3], torch.full((3,), 2))  # takes one of the two slots
    for row in (0, 1, 20, 37):
        alone = compute(all_rows[row : row + 1], torch.tensor([row % 2]))
        assert torch.equal(alone[0], whole[row])
    assert torch.equal(compute(all_rows[5:37], all_rows[5:37] % 2), whole[5:37])


def test_the_product_of_a_part_adds_to_the_residual() -> None:
    """A factor multiplies the product alone, not the residual that it is added to."""
    adapters = slots_for(64, [40], torch.float32)
    linear = AdaptedLinear(DenseLinear(random(40, 64), None), adapters, 0)
    plain = random_update(64, ((8, 40),), torch.float32, 1)
    dora = random_update(64, ((8, 40),), torch.float32, 2, scales_outputs=True)
    residual, x = random(9, 40) + 3, random(9, 64)
    product, ones = linear.base(x), torch.ones(3)
    unchanged = linear.add_to(residual.clone(), x)
    groups = [
        AdapterRows(packed(adapters, update), rows, ones)
        for update, rows in ((plain, torch.arange(0, 3)), (dora, torch.arange(5, 8)))
    ]
    with adapters.running(groups):
        found = linear.add_to(residual.clone(), x)
    for update, rows in ((plain, slice(0, 3)), (dora, slice(5, 8))):
        wanted = residual[rows] + expected(update, x[rows], product[rows], ones)
        assert (found[rows] - wanted).abs().max() < 1e-4
    assert torch.equal(found[[3, 4, 8]], unchanged[[3, 4, 8]])


def test_an_adapter_of_other_products_keeps_the_bits_of_this_one() -> None:
    adapters = slots_for(64, [40], BF16)
    x, y = random(5, 64, dtype=BF16), random(5, 40, dtype=BF16)
    y[0, 0] = -0.0
    before = y.clone()
    with adapters.running([AdapterRows(packed(adapters, None), torch.arange(5), torch.ones(5))]):
        adapters.add(0, x, y)
    assert torch.equal(y.view(torch.int16), before.view(torch.int16))


def test_weights_that_an_adapter_leaves_out_keep_their_bits() -> None:
    """Of the same product, and a slot keeps nothing of the adapter that was in it before."""
    adapters = slots_for(64, [40, 24], torch.float32, max_adapters=1)
    whole = random_update(64, ((8, 40), (8, 24)), torch.float32, 1, scales_outputs=True)
    part = LowRankPart(range(40, 64), range(8), whole.parts[1].up)
    second = LowRankUpdate(whole.down[8:], (part,))
    x, y, rows, ones = random(5, 64), random(5, 64), torch.arange(5), torch.ones(5)
    for update in (whole, second):
        found = y.clone()
        with adapters.running([AdapterRows(packed(adapters, update), rows, ones)]):
            adapters.add(0, x, found)
        assert (found - expected(update, x, y, ones)).abs().max() < 1e-4
    assert torch.equal(found[:, :40], y[:, :40])


def test_blocks_have_rows_of_one_slot_and_each_row_once() -> None:
    blank = Adapter(products={})
    sizes, slots = (1, 40, 16, 3), (2, 0, 3, 1)
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(1))
    groups = [
        AdapterRows(blank, rows.sort().values, torch.full((len(rows),), float(slot)))
        for rows, slot in zip(order.split(sizes), slots, strict=True)
    ]
    num_rows, num_blocks = sum(sizes) + 4, 9
    flat = torch.from_numpy(sorted_rows(groups, slots, num_rows, num_blocks))
    rows, scales, of_block, firsts, ends = flat.split([num_rows] * 2 + [num_blocks] * 3)
    seen = []
    for slot, first, end in zip(of_block.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        assert 0 <= end - first <= ROWS
        own = rows[first:end].tolist()
        assert set(own) <= set(groups[slots.index(slot)].rows.tolist()) or not own
        assert (scales.view(torch.float32)[first:end] == slot).all()
        seen += own
    assert sorted(seen) == list(range(sum(sizes)))
