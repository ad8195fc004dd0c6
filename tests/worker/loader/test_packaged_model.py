"""The packaged models: logits of the real files against transformers on the same files."""

import pytest
import torch

from tests.e2e.reference import Reference, packaged_model
from tests.fakes.dense_attention import DenseAttention
from worker.loader.weights import load_model
from worker.models.registry import spec_of


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        pytest.param("smollm2-135m-instruct", 300, marks=pytest.mark.slow),
        # Its window is 512 tokens.
        pytest.param("gemma3-270m", 700, marks=pytest.mark.long),
    ],
)
def test_logits_equal_transformers(name: str, num_tokens: int) -> None:
    prepared = packaged_model(name)
    spec = spec_of(prepared)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, min(spec.vocab_size, 200_000), (num_tokens,), generator=generator)
    decoder = load_model(prepared, spec, torch.float32, torch.device("cpu"), lambda fraction: None)
    hidden = decoder.forward(tokens, torch.arange(num_tokens), DenseAttention(spec))
    reference = Reference.load(name).model
    with torch.inference_mode():
        expected_hidden = reference.model(tokens[None]).last_hidden_state[0]
    # Not of all tokens at once: Gemma has 262,144 logits a token.
    for rows in torch.arange(num_tokens).split(100):
        with torch.inference_mode():
            expected = reference.lm_head(expected_hidden[rows])
        # scores reach 30 here, so float32 itself is good for about 1e-4
        assert (decoder.logits(hidden[rows]) - expected).abs().max() < 1e-3
