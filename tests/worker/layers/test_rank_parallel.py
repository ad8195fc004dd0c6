"""Sums and concatenations over tensor-parallel ranks, in a group with fixed other ranks."""

import pytest
import torch

from tests.fakes.devices import CPU
from worker.layers.embedding import dense_table, vocab_parallel_table
from worker.layers.linear import DenseLinear, PartOutput, ResidualLinear, VocabParallelHead
from worker.layers.norm import NormWeight


class FixedGroup:
    """Rank 1 of three; ranks 0 and 2 always contribute `before` and `after`."""

    rank, size = 1, 3

    def __init__(self, before: float, after: float) -> None:
        self._others = before, after

    def join(self, epoch: int) -> None:
        raise AssertionError("the group has been joined")

    def leave(self) -> None:
        raise AssertionError("the group is never left")

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        before, after = (torch.full_like(x, each) for each in self._others)
        return torch.stack((before, x, after))


def product(value: float, dtype: torch.dtype) -> DenseLinear:
    """A product [2, 1] of a constant value."""
    return DenseLinear(torch.full((2, 1), value, dtype=dtype), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_over_ranks_are_rounded_once(dtype: torch.dtype) -> None:
    """Each summand alone would be rounded away: half the distance between two values."""
    large = {torch.bfloat16: 256.0, torch.float16: 2048.0, torch.float32: float(1 << 24)}[dtype]
    group = FixedGroup(1.0, 1.0 if dtype != torch.float32 else 0.0)
    linear = ResidualLinear(product(1.0, dtype), PartOutput(group))
    x = torch.ones(3, 1, dtype=dtype)
    residual = torch.full((3, 2), large, dtype=dtype)
    result = linear.add_to(residual, x)
    assert result.dtype == dtype
    # float32 sums are not added in a wider type
    assert result.tolist() == [[large + (4.0 if dtype != torch.float32 else 0.0)] * 2] * 3


def test_an_output_norm_is_applied_to_the_sum_of_all_ranks() -> None:
    norm = CPU.norm(NormWeight(torch.tensor([1.0, 2.0]), 1e-6))
    linear = ResidualLinear(product(1.0, torch.float32), PartOutput(FixedGroup(1.0, 0.0), norm))
    found = linear.add_to(torch.full((1, 2), 4.0), torch.ones(1, 1))
    torch.testing.assert_close(found, torch.tensor([[5.0, 6.0]]))


def test_logits_of_uneven_ranks_are_concatenated() -> None:
    head = VocabParallelHead(
        product(5.0, torch.float32), FixedGroup(7.0, 9.0), (range(3), range(3, 5), range(5, 6))
    )
    x = torch.ones(2, 1)
    assert head(x).tolist() == [[7.0, 7.0, 7.0, 5.0, 5.0, 9.0]] * 2
    assert head.add_to(torch.ones(2, 6), x)[0].tolist() == [8.0, 8.0, 8.0, 6.0, 6.0, 10.0]


def test_embedding_rows_come_from_the_rank_that_has_them() -> None:
    table = dense_table(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    shared = vocab_parallel_table(table, FixedGroup(0.0, 0.0), range(10, 12), 20, checks_ids=True)
    found = shared.rows(torch.tensor([11, 3, 10, 19]))
    assert found.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    for token in (-1, 20):
        with pytest.raises(IndexError, match=f"row {token} of 20"):
            shared.rows(torch.tensor([10, token]))
