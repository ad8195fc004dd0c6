"""Logits of tiny random checkpoints against transformers, loaded from its files."""

from pathlib import Path

import pytest
import torch

from tests.fakes.dense_attention import logits_in_chunks
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import CONFIGS, save_tiny
from worker.loader.weights import load_model
from worker.models.decoder import Decoder

TOKENS = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(7))
ERRORS = {"deepseek3": 2e-4}
"""Largest error of a logit where it is not 1e-4: products with absorbed keys and values add more
numbers (1.1e-4 from float64 here, of logits up to 4)."""


def load(checkpoint: Path, dtype: torch.dtype) -> Decoder:
    prepared = prepare_checkpoint(checkpoint, checkpoint / "prepared")
    return load_model(prepared, spec_of(prepared), dtype, CPU, lambda fraction: None)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_in_float32(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
    assert expected.std() > 0.5, "a difference would not be visible"
    decoder = load(tmp_path, torch.float32)
    logits = logits_in_chunks(decoder, TOKENS, 30)
    error = ERRORS.get(name, 1e-4)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < error
    assert (logits_in_chunks(decoder, TOKENS, 17, 1, 12) - expected).abs().max() < error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma3"])
def test_half_precision_is_close(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
        native = model.to(dtype)(TOKENS[None]).logits[0].float()
    error = (logits_in_chunks(load(tmp_path, dtype), TOKENS, 30) - expected).abs().mean()
    assert error < 1.2 * (native - expected).abs().mean()


def test_a_checkpoint_of_several_files_is_loaded(tmp_path: Path) -> None:
    model = save_tiny("qwen2", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
    assert (
        logits_in_chunks(load(tmp_path, torch.float32), TOKENS, 30) - expected
    ).abs().max() < 1e-4


def test_logits_of_no_rows_are_empty(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    decoder = load(tmp_path, torch.bfloat16)
    assert decoder.float32_logits(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 96)
