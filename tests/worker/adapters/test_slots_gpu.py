"""Adapters in slots on a GPU: float64, bits of every batch, and a graph that is replayed."""

import pytest
import torch

from tests.worker.reference.low_rank import expected, packed, random_update
from worker.cuda.accelerator import Accelerator
from worker.cuda.layers.adapter_slots import SlotAdapters
from worker.layers.adapters import (
    AdaptedProduct,
    AdaptedWeight,
    AdapterRows,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
PARTS = ((16, 4096), (4, 1024), (64, 1000))
NUM_INPUTS = 4096 + 64


def slots(max_adapters: int) -> SlotAdapters:
    adapters = SlotAdapters(lambda: Accelerator(CUDA))
    weights, first = [], 0
    for _, outputs in PARTS:
        weights.append(AdaptedWeight(range(first, first + outputs), NUM_INPUTS))
        first += outputs
    adapters.reserve([AdaptedProduct(first, weights)], max_adapters, 64, BF16)
    return adapters


def test_adapters() -> None:
    """More adapters than slots, one after the other; rows without one keep their bits."""
    adapters = slots(3)
    num_outputs = sum(outputs for _, outputs in PARTS)
    x, y = torch.randn(300, NUM_INPUTS).to(BF16), torch.randn(300, num_outputs).to(BF16)
    there, given = x.to(CUDA), y.to(CUDA)
    updates = [
        random_update(NUM_INPUTS, PARTS, BF16, seed, scales_outputs=seed == 1) for seed in range(5)
    ]
    owners = [packed(adapters, update) for update in updates]
    for chosen in ((0, 1, 2), (3, 4, 1), (1,), (2, 0)):
        out = given.clone()
        groups = [
            AdapterRows(
                owners[number],
                rows := torch.arange(place, 300, 4),
                torch.full((len(rows),), 0.5),
            )
            for place, number in enumerate(chosen)
        ]
        with adapters.running(groups):
            adapters.add(0, there, out)
        found = out.cpu()
        for group, number in zip(groups, chosen, strict=True):
            rows = group.rows
            wanted = expected(updates[number], x[rows], y[rows], group.scales)
            error = (found[rows].double() - wanted).abs().max() / wanted.abs().max()
            assert error < 0.02, number
        assert torch.equal(found[3::4], y[3::4])
        row = groups[0].rows[7:8]
        alone = given[row].clone()
        one = AdapterRows(owners[chosen[0]], torch.zeros(1, dtype=torch.int64), torch.ones(1) / 2)
        with adapters.running([one]):
            adapters.add(0, there[row], alone)
        assert torch.equal(alone.cpu(), found[row]), "bits depend on the batch"


def test_a_graph_reads_the_rows_and_adapters_of_each_replay() -> None:
    adapters = slots(2)
    owners = [packed(adapters, random_update(NUM_INPUTS, PARTS, BF16, seed)) for seed in range(3)]
    num_outputs = sum(outputs for _, outputs in PARTS)
    x = torch.randn(24, NUM_INPUTS, device=CUDA).to(BF16)
    y, out = torch.randn(24, num_outputs, device=CUDA).to(BF16), torch.empty(0)
    adapters.reserve_graphs(24)

    def run() -> torch.Tensor:
        result = y.clone()
        adapters.add(0, x, result)
        return result

    with adapters.in_graph(24):
        run()
        graph, out = Accelerator(CUDA).capture(run)
    for chosen in ((0, 1), (2, 0), (1,), (0, 1)):
        groups = [
            AdapterRows(
                owners[number], rows := torch.arange(place, 20, 3), torch.full((len(rows),), 2.0)
            )
            for place, number in enumerate(chosen)
        ]
        with adapters.running(groups):
            adapters.fill_graph(24)
            graph.replay()
            again = out.clone()
            adapters.forget()
            eager = run()
        assert torch.equal(again, eager), chosen
        assert not torch.equal(again, y)
