"""Bidirectional models through scheduler and runner against transformers, in float32."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.fakes.pooling_engine import PoolingEngine, prepare
from tests.fakes.tiny_encoders import CONFIGS, save_encoder
from tests.fakes.tiny_pooling import dense, pooled, save_modules

PROMPTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (23, 40, 11, 1, 57, 128)
]
_KINDS = ("cls_token", "mean_tokens", "weightedmean_tokens", "lasttoken")


@torch.inference_mode()
def hidden_states(model: torch.nn.Module, prompt: list[int], **inputs: object) -> torch.Tensor:
    hidden: torch.Tensor = model(torch.tensor([prompt]), **inputs).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_of_packed_texts(name: str, tmp_path: Path) -> None:
    """All pooling types, joined, and a Dense module; texts of several steps, none padded."""
    folder = tmp_path / "model"
    model = save_encoder(name, folder)
    save_modules(folder, model.config.hidden_size, *_KINDS, dense=24)
    engine = PoolingEngine(prepare(folder))
    requests = [engine.add(prompt) for prompt in (*PROMPTS, *PROMPTS)]
    short = engine.add(PROMPTS[0], dimensions=8)
    engine.harness.run()
    assert engine.harness.kv_cache.usage == 0
    for request in requests:
        hidden = hidden_states(model, request.prompt_token_ids)
        joined = torch.cat([pooled(hidden, kind) for kind in _KINDS])
        want = F.normalize(dense(folder, joined), dim=0)
        torch.testing.assert_close(engine.result(request), want, atol=1e-5, rtol=0)
        assert request.num_cached_tokens == 0
    first = engine.result(requests[0])
    torch.testing.assert_close(engine.result(short), F.normalize(first[:8], dim=0))
