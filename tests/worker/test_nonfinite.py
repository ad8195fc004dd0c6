"""Detection of sequences with NaN or infinity in a step."""

import numpy as np
import pytest
import torch

from tests.fakes.devices import CPU
from tests.worker.kernel_variants import LOADABLE, load_variant, with_each
from worker.batch.transfers import HostTransfers
from worker.cpu.device import CpuTransfers

each_way = with_each([None, *LOADABLE])  # None: torch
NAN, INF = float("nan"), float("inf")
STARTS = np.array([0, 3, 4, 9], dtype=np.int32)


def find(variant, hidden: torch.Tensor, starts: np.ndarray = STARTS) -> list[bool]:
    transfers = HostTransfers() if variant is None else CpuTransfers(load_variant(variant))
    return transfers.nonfinite_sequences(hidden, starts).tolist()


@each_way
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_nonfinite_value_anywhere_is_found_in_its_sequence(
    variant, value: float, dtype: torch.dtype
) -> None:
    for size in (1, 5, 16, 37):
        for token, expected in ((0, [1, 0, 0]), (3, [0, 1, 0]), (6, [0, 0, 1])):
            hidden = torch.randn(9, size).to(dtype)
            hidden[token, size // 2] = value
            assert find(variant, hidden) == expected
        assert find(variant, torch.randn(9, size).to(dtype)) == [0, 0, 0]


@each_way
def test_large_finite_values_are_not_reported(variant) -> None:
    """Although their sum is infinite."""
    hidden = torch.full((9, 32), 3e38)
    assert find(variant, hidden) == [0, 0, 0]
    assert find(variant, hidden, np.array([0, 9], dtype=np.int32)) == [0]


def test_a_detector_is_selected_for_this_machine() -> None:
    hidden = torch.randn(9, 16)
    hidden[8, 0] = NAN
    assert CPU.transfers().nonfinite_sequences(hidden, STARTS).tolist() == [False, False, True]
