"""Stacked experts: Triton in its interpreter and the strict fake FlashInfer against plain torch."""

from typing import Any

import pytest
import torch

from tests.fakes.devices import CPU, GPU, dense_experts
from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer_rows import FakeRowKernels
from tests.fakes.fake_paged_wrapper import ContractError
from tests.fakes.triton import interpret_kernels
from tests.worker.reference.sorted_pairs import sorted_pairs
from worker.cuda import device as cuda_device
from worker.cuda.layers.flashinfer_kernels import FlashInferExperts, takes_experts
from worker.cuda.layers.triton_experts import PairBlocks, TritonExperts
from worker.cuda.layers.triton_kernels import triton_gate
from worker.layers.experts import DenseExperts, ExpertRanks, Experts, StackedWeights

pytestmark = pytest.mark.suite("devices")

EXPERTS, HIDDEN, INNER, TOP_K = 6, 72, 40, 2
F32, BF16 = torch.float32, torch.bfloat16


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def stacked_weights(dtype: torch.dtype, biases: bool = False) -> StackedWeights:
    gate_up = 0.2 * random(EXPERTS, 2 * INNER, HIDDEN)
    down = 0.2 * random(EXPERTS, HIDDEN, INNER)
    if not biases:
        return StackedWeights(gate_up.to(dtype), down.to(dtype))
    first, second = random(EXPERTS, 2 * INNER, dtype=dtype), random(EXPERTS, HIDDEN, dtype=dtype)
    return StackedWeights(gate_up.to(dtype), down.to(dtype), first, second)


def part(stacked: StackedWeights, experts: slice) -> StackedWeights:
    biases = stacked.gate_up_bias, stacked.down_bias
    kept = (each if each is None else each[experts] for each in biases)
    return StackedWeights(stacked.gate_up[experts], stacked.down[experts], *kept)


def routed(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    best = random(num_rows, EXPERTS).softmax(1).topk(TOP_K)
    return random(num_rows, HIDDEN, dtype=dtype), best.values, best.indices


@pytest.mark.parametrize("num_rows", [1, 9, 70, 600])
@pytest.mark.parametrize(("first", "count"), [(0, EXPERTS), (2, 3), (5, 1)])
def test_blocks_hold_each_own_pair_once_and_one_expert_each(
    num_rows: int, first: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret_kernels(monkeypatch)
    chosen = routed(num_rows, F32)[2]
    stacked = part(stacked_weights(F32), slice(first, first + count))
    experts = TritonExperts(stacked, triton_gate("silu"), first)
    found = PairBlocks.empty(chosen, count, 4)
    experts._sort(chosen, found, 4)
    wanted = sorted_pairs(chosen, first, count, 4)
    for name in PairBlocks.__slots__:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("num_rows", [1, 20, 210])
def test_triton_computes_what_torch_does(
    num_rows: int, biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, and as the sum of two that have four and two of the experts."""
    interpret_kernels(monkeypatch)
    stacked, args = stacked_weights(F32, biases), routed(num_rows, F32)
    expected = dense_experts(stacked)(*args)
    assert expected.std() > 0.3
    found = TritonExperts(stacked, triton_gate("silu"))(*args)
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    ranks = (TritonExperts(part(stacked, slice(0, 4)), triton_gate("silu")),)
    ranks += (TritonExperts(part(stacked, slice(4, 6)), triton_gate("silu"), 4),)
    total = sum(rank(*args) for rank in ranks)
    assert torch.allclose(total, expected, atol=1e-4, rtol=1e-4)


class OnFake:
    """FlashInferExperts on the strict fake."""

    def __init__(self, stacked: StackedWeights, ranks: ExpertRanks) -> None:
        self.device = FakeDevice()
        self.library = FakeRowKernels(self.device)
        weights = (stacked.gate_up, stacked.down, stacked.gate_up_bias, stacked.down_bias)
        there = (None if each is None else self.device.adopt(each) for each in weights)
        self.experts: Experts = FlashInferExperts(self.library, StackedWeights(*there), ranks)

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return on_host(self.experts(*map(self.device.adopt, args)))


@pytest.mark.parametrize("biases", [False, True])
def test_flashinfer_gets_weights_in_its_order(biases: bool) -> None:
    stacked, args = stacked_weights(BF16, biases), routed(9, BF16)
    expected = dense_experts(stacked)(*args)
    found = OnFake(stacked, ExpertRanks(EXPERTS))(*args)
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_flashinfer_ranks_sum_to_one() -> None:
    """Ranks with whole experts, and ranks with inner columns of each; the first adds the bias."""
    stacked, args = stacked_weights(BF16, biases=True), routed(9, BF16)
    expected = dense_experts(stacked)(*args)
    whole = torch.zeros_like(expected)
    for rank in range(2):
        first = 3 * rank
        there = OnFake(part(stacked, slice(first, first + 3)), ExpertRanks(6, first, rank, 2, True))
        whole += there(*args)
    assert (whole - expected).norm() < 0.01 * expected.norm()
    halves = []
    for rank in range(2):
        inner = torch.arange(16 * rank, 16 * rank + (16, 24)[rank])
        rows = torch.cat((inner, inner + INNER))
        assert stacked.gate_up_bias is not None
        shard = StackedWeights(
            stacked.gate_up[:, rows],
            stacked.down[:, :, inner],
            stacked.gate_up_bias[:, rows],
            None if rank else stacked.down_bias,
        )
        halves.append(OnFake(shard, ExpertRanks(6, 0, rank, 2))(*args))
    assert (sum(halves) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, lambda x: x.float(), "16 bits"),
        (1, lambda weights: weights.double(), "scales are torch.float32"),
        (2, lambda chosen: chosen + EXPERTS, "experts exist"),
        (2, lambda chosen: chosen[:-1], "each token has experts"),
    ],
)
def test_the_fake_refuses_misuse(number: int, change: Any, message: str) -> None:
    there, args = OnFake(stacked_weights(BF16), ExpertRanks(EXPERTS)), [*routed(3, BF16)]
    args[number] = change(args[number])
    with pytest.raises(ContractError, match=message):
        there(*args)


def test_the_device_and_the_weights_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked, ranks = stacked_weights(BF16), ExpertRanks(EXPERTS)
    assert takes_experts(stacked, "silu", ranks)
    assert not takes_experts(stacked, "gelu_tanh", ranks)
    assert not takes_experts(stacked_weights(F32), "silu", ranks)
    assert not takes_experts(stacked, "silu", ExpertRanks(13, 0, 0, 2, True)), "7 and 6 experts"
    assert isinstance(CPU.stacked_experts(stacked, "silu", ranks), DenseExperts)
    monkeypatch.setattr(cuda_device, "TritonExperts", lambda *_: "triton")
    monkeypatch.setattr(cuda_device, "FlashInferExperts", lambda *_: "flashinfer")
    for is_hopper, library, is_prebuilt, expected in (
        (True, FakeRowKernels(FakeDevice()), True, "flashinfer"),
        (True, FakeRowKernels(FakeDevice()), False, "triton"),
        (True, None, True, "triton"),
        (False, FakeRowKernels(FakeDevice()), True, "triton"),
    ):
        monkeypatch.setattr(cuda_device, "has_prebuilt_experts", lambda found=is_prebuilt: found)
        monkeypatch.setattr(cuda_device, "is_hopper", lambda device, found=is_hopper: found)
        monkeypatch.setattr(cuda_device, "usable_flashinfer", lambda found=library: found)
        assert GPU.stacked_experts(stacked, "silu", ranks) == expected
