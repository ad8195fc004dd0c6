"""The best token of every row, and which rows are not finite."""

import random

import numpy as np
import pytest
import torch

from tests.worker.sampling.settings import backend_of, each_backend

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_best_token_has_the_largest_logit_and_the_lowest_id(
    variant, dtype: torch.dtype
) -> None:
    rng, backend = random.Random(4), backend_of(variant)
    for vocab_size in (1, 3, 16, 63, 64, 65, 1023, 1024, 1025, 5000, rng.randint(5, 9000)):
        logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        logits = logits.to(dtype)
        ties = rng.sample(range(vocab_size), min(vocab_size, 3))
        logits[1, ties] = 9.0
        logits[2] = -2.0
        logits[3, : vocab_size // 2] = -INF
        best = backend.best(logits)
        expected = logits.float().numpy()
        assert best.token_ids.tolist() == expected.argmax(axis=1).tolist()
        assert best.logits.tolist() == expected.max(axis=1).tolist()
        assert best.token_ids[1] == min(ties)
        assert not best.nonfinite.any()


@each_backend
def test_rows_with_nan_or_infinity_are_nonfinite_but_masked_rows_are_not(variant) -> None:
    logits = torch.randn(7, 3000)
    logits[0, :2999] = -INF
    logits[1, 4] = NAN
    logits[2, 2999] = INF
    logits[3, :] = -INF
    logits[4, 1], logits[4, 2] = NAN, -INF
    logits[6, 2998] = NAN
    best = backend_of(variant).best(logits)
    assert best.nonfinite.tolist() == [False, True, True, True, True, False, True]
    assert best.token_ids[0] == 2999
    assert ((best.token_ids >= 0) & (best.token_ids < 3000)).all()
    assert np.isnan(best.logits[[1, 4, 6]]).all()


@each_backend
def test_strided_and_empty_batches_are_accepted(variant) -> None:
    wide = torch.randn(6, 50)
    found = backend_of(variant).best(wide[::2, 5:40])
    assert found.token_ids.tolist() == wide[::2, 5:40].argmax(dim=1).tolist()
    assert backend_of(variant).best(wide[:0]).token_ids.tolist() == []
