"""The packaged model: logits of the real file against transformers on the same file."""

import pytest
import torch

from tests.e2e.reference import Reference, packaged_model
from tests.fakes.dense_attention import DenseAttention
from worker.loader.weights import load_model
from worker.models.registry import spec_of

TOKENS = torch.randint(0, 49152, (300,), generator=torch.Generator().manual_seed(5))


@pytest.mark.slow
def test_logits_equal_transformers() -> None:
    with torch.inference_mode():
        expected = Reference.load().model(TOKENS[None]).logits[0]
    prepared = packaged_model()
    spec = spec_of(prepared)
    decoder = load_model(prepared, spec, torch.float32, torch.device("cpu"), lambda fraction: None)
    attention = DenseAttention(spec)
    logits = decoder.logits(decoder.forward(TOKENS, torch.arange(len(TOKENS)), attention))
    # scores reach 30 here, so float32 itself is good for about 1e-4
    assert (logits - expected).abs().max() < 1e-3
