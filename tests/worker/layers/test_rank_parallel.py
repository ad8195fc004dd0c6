"""What ranks add up and put side by side; a group whose other ranks are known beforehand."""

import pytest
import torch

from worker.layers.embedding import DenseTable, VocabParallelTable
from worker.layers.linear import DenseLinear, PartOutput, ResidualLinear, VocabParallelHead
from worker.layers.norm import RMSNorm


class Known:
    """Rank 1 of three, whose others always have `before` and `after` what it has."""

    rank, size = 1, 3

    def __init__(self, before: float, after: float) -> None:
        self._others = before, after

    def join(self, epoch: int) -> None:
        raise AssertionError("they have met")

    def leave(self) -> None:
        raise AssertionError("nobody leaves")

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        before, after = (torch.full_like(x, each) for each in self._others)
        return torch.stack((before, x, after))


def product(value: float, dtype: torch.dtype) -> DenseLinear:
    """Of one column and two rows."""
    return DenseLinear(torch.full((2, 1), value, dtype=dtype), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_summands_are_rounded_once(dtype: torch.dtype) -> None:
    """Each alone would be lost: half of the distance between two numbers of this size."""
    large = {torch.bfloat16: 256.0, torch.float16: 2048.0, torch.float32: float(1 << 24)}[dtype]
    group = Known(1.0, 1.0 if dtype != torch.float32 else 0.0)
    linear = ResidualLinear(product(1.0, dtype), PartOutput(group))
    x = torch.ones(3, 1, dtype=dtype)
    residual = torch.full((3, 2), large, dtype=dtype)
    result = linear.add_to(residual, x)
    assert result.dtype == dtype
    # float32 itself has nothing wider to be added in
    assert result.tolist() == [[large + (4.0 if dtype != torch.float32 else 0.0)] * 2] * 3


def test_a_norm_of_the_output_sees_the_sum_of_all_ranks() -> None:
    norm = RMSNorm(torch.tensor([1.0, 2.0]), 1e-6)
    linear = ResidualLinear(product(1.0, torch.float32), PartOutput(Known(1.0, 0.0), norm))
    found = linear.add_to(torch.full((1, 2), 4.0), torch.ones(1, 1))
    torch.testing.assert_close(found, torch.tensor([[5.0, 6.0]]))


def test_scores_of_all_lie_side_by_side_though_some_have_fewer() -> None:
    head = VocabParallelHead(
        product(5.0, torch.float32), Known(7.0, 9.0), (range(3), range(3, 5), range(5, 6))
    )
    x = torch.ones(2, 1)
    assert head(x).tolist() == [[7.0, 7.0, 7.0, 5.0, 5.0, 9.0]] * 2
    assert head.add_to(torch.ones(2, 6), x)[0].tolist() == [8.0, 8.0, 8.0, 6.0, 6.0, 10.0]


def test_rows_come_from_whoever_has_them() -> None:
    table = DenseTable(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    shared = VocabParallelTable(table, Known(0.0, 0.0), range(10, 12), 20)
    found = shared.rows(torch.tensor([11, 3, 10, 19]))
    assert found.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    for token in (-1, 20):
        with pytest.raises(IndexError, match=f"row {token} of 20"):
            shared.rows(torch.tensor([10, token]))
