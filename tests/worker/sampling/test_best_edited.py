"""The best token after logits edits, found without changing the logits."""

import random

import pytest
import torch

from proto.messages.logit_edits import LogitEdits
from tests.worker.sampling.edit_cases import grown_edits
from tests.worker.sampling.settings import backend_of, each_backend
from worker.reference.sampling import TorchBackend
from worker.sampling.backend import RowChange
from worker.sampling.logit_edits import RowEdits, edit_logits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_edits(rng: random.Random, ids: list[int]) -> LogitEdits:
    """Random edits of these tokens, sometimes of one kind only."""
    kinds = rng.choice([{"penalty"}, {"bias"}, {"words"}, {"allowed"}, {"penalty", "bias"}, {*""}])
    kinds = kinds or {"penalty", "bias", "words", "allowed"}
    some = lambda most: tuple(rng.sample(ids, rng.randint(1, min(len(ids), most))))  # noqa: E731
    biased = some(40) if "bias" in kinds else ()
    return LogitEdits(
        presence_penalty=rng.choice([0.0, 1.5, -2.0]) if "penalty" in kinds else 0.0,
        frequency_penalty=rng.choice([0.3, -1.0]) if "penalty" in kinds else 0.0,
        repetition_penalty=rng.choice([1.0, 1.3, 0.7]) if "penalty" in kinds else 1.0,
        bias_token_ids=biased,
        bias_values=tuple(float(rng.randint(-8, 8)) / 4 for _ in biased),
        bad_words=tuple((each,) for each in some(20)) if "words" in kinds else (),
        allowed_token_ids=some(60) if "allowed" in kinds else None,
    )


def random_change(rng: random.Random, row: int, logits: torch.Tensor) -> RowChange:
    """Random edits mostly of the best tokens, so that the best token often changes."""
    ids = logits.argsort(descending=True).tolist()
    ids = ids[:30] + rng.sample(ids, min(len(ids), 100))
    make = rng.choice([RowEdits, grown_edits])
    prompt, outputs = rng.choices(ids, k=20), rng.choices(ids, k=50)
    late = tuple(rng.sample(sorted(set(ids)), rng.choice([0, 0, 1, min(3, len(set(ids)) - 1)])))
    return RowChange(row, make(random_edits(rng, sorted(set(ids))), prompt, outputs), late)


@each_backend
@pytest.mark.parametrize(("seed", "dtype"), list(enumerate(DTYPES)), ids=str)
def test_best_returns_the_best_token_after_edits(variant, dtype: torch.dtype, seed: int) -> None:
    """Many logits are equal, also after edits; the lowest id wins."""
    rng, backend = random.Random(seed), backend_of(variant)
    moved = 0
    for vocab_size in (40, 1023, 1024, 1025, 5000):
        logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        logits = ((logits * 8).round() / 4).to(dtype)
        before = logits.clone()
        changes = [random_change(rng, row, logits[row].float()) for row in range(0, 24) if row % 5]
        found = backend.best(logits, changes)
        assert torch.equal(logits, before), "the logits are needed unedited for log-probabilities"
        plain = TorchBackend().best(before)
        assert found.logits.tolist() == plain.logits.tolist()
        expected = before.float()
        edit_logits(expected, [(each.row, each.edits) for each in changes])
        for each in changes:
            expected[each.row, list(each.suppressed)] = float("-inf")
        possible = (expected.amax(1) > float("-inf")).tolist()
        for row, token_id in enumerate(found.token_ids.tolist()):
            if possible[row]:
                assert token_id == expected[row].numpy().argmax(), (vocab_size, row)
            assert 0 <= token_id < vocab_size
        moved += int((found.token_ids != plain.token_ids).sum())
    assert moved > 20


@each_backend
def test_nonfinite_rows_are_detected_despite_edits(variant) -> None:
    logits = torch.randn(4, 2000)
    logits[1, 7], logits[2, 1999] = float("nan"), float("inf")
    edits = LogitEdits(bad_words=((7,), (1999,)), presence_penalty=1.0)
    changes = [RowChange(row, RowEdits(edits, [3], [7])) for row in range(3)]
    best = backend_of(variant).best(logits, changes)
    assert best.nonfinite.tolist() == [False, True, True, False]
    assert ((best.token_ids >= 0) & (best.token_ids < 2000)).all()


@each_backend
@pytest.mark.parametrize("seed", range(3))
def test_edits_in_place_equal_the_reference_bit_by_bit(variant, seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(20, 3000, generator=torch.Generator().manual_seed(seed)) * 5
    changes = [random_change(rng, row, logits[row]) for row in (0, 3, 4, 11, 19)]
    pairs = [(each.row, each.edits) for each in changes]
    expected = logits.clone()
    edit_logits(expected, pairs)
    backend_of(variant).edit(logits, pairs)
    assert torch.equal(logits, expected)
