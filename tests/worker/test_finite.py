"""Which sequences of a step have numbers, and which do not."""

import numpy as np
import pytest
import torch

from worker.finite import broken_rows, broken_sequences

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_odd_number_anywhere_breaks_its_sequence(odd: float, dtype: torch.dtype) -> None:
    starts = np.array([0, 3, 4, 9], dtype=np.int32)
    for token, expected in ((0, [1, 0, 0]), (3, [0, 1, 0]), (6, [0, 0, 1])):
        hidden = torch.randn(9, 16, dtype=dtype)
        hidden[token, 5] = odd
        assert broken_sequences(hidden, starts).tolist() == expected
    assert not broken_sequences(torch.randn(9, 16, dtype=dtype), starts).any()


def test_logits_may_be_masked_but_not_odd() -> None:
    logits = torch.randn(6, 32)
    logits[0, :31] = -INF
    logits[1, 4] = NAN
    logits[2, 4] = INF
    logits[3, :] = -INF
    logits[4, 1], logits[4, 2] = NAN, -INF
    assert broken_rows(logits).tolist() == [False, True, True, True, True, False]
