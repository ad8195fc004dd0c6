"""The tokens that filters keep on a GPU are those of the definition, in every batch."""

from typing import Any

import pytest
import torch

from tests.worker.reference.filters import check_kept
from tests.worker.sampling.filtered_cases import FILTERED, KINDS, filtered_case, kept_tokens

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ALONE: dict[str, dict[str, Any]] = {
    "top-p": {"top_p": (0.9, 0.5, 0.95, 0.999)},
    "top-k": {"top_k": (1, 20, 50, 5000)},
    "min-p": {"min_p": (0.02, 1.0)},
    "mixed": FILTERED,
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_tokens_are_those_of_the_definition(kind: str, name: str) -> None:
    logits, rows = filtered_case(64, 128_256, kind, **ALONE[name])
    kept = kept_tokens(logits, rows, CUDA)
    # Where thousands of tokens are kept, rounding moves the cut by a token in some rows.
    assert check_kept(logits, kept, rows) <= 16
    some = slice(17, 20)
    assert torch.equal(kept_tokens(logits[some], rows[some], CUDA), kept[some])
    assert torch.equal(kept_tokens(logits, rows, CUDA), kept)
