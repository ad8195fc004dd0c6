"""FLOPs of a model by its spec against those that torch counts in transformers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import CONFIGS, save_tiny
from worker.models.latent_attention import LatentAttentionSpec
from worker.models.recurrence import RecurrentSpec

NUM_TOKENS = 7


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_equal_those_counted_by_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers computes logits of all positions, and all pairs of tokens before masking.

    Recurrences are left out: it computes them in chunks, with other products.
    """
    model = save_tiny(name, tmp_path)
    model.set_attn_implementation("eager")
    _leave_out_recurrences(model, monkeypatch)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(NUM_TOKENS)[None], use_cache=False)
    spec = spec_of(prepare_checkpoint(tmp_path, tmp_path / "prepared"))
    shape = spec.compute_shape
    pairs = NUM_TOKENS * NUM_TOKENS
    recurrences = sum(
        mixer.shape.flops_per_token
        for mixer in spec.state_layers
        if isinstance(mixer, RecurrentSpec)
    )
    expected = NUM_TOKENS * (shape.linear_flops + shape.head_flops - recurrences)
    for attention in spec.attention_layers:
        if isinstance(attention, LatentAttentionSpec):  # there over keys and values of each head
            widths = attention.query_dim + attention.v_head_dim
            expected += pairs * 2 * attention.num_heads * widths
            latents = attention.head_dim + attention.kv_lora_rank
            assert attention.shape.flops_per_key == 2 * attention.num_heads * latents
        else:
            expected += pairs * attention.shape.flops_per_key
    by_layer = sum(attention.shape.flops_per_key for attention in spec.attention_layers)
    assert sum(flops for _, flops in shape.attention_flops) == by_layer
    by_operation = counter.get_flop_counts()["Global"]
    by_operation.pop(torch.ops.aten.convolution, 0)  # of some taps, beside the recurrence
    assert sum(by_operation.values()) == expected


def _leave_out_recurrences(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_scan(x: torch.Tensor, *arguments: Any, **rest: Any) -> torch.Tensor:
        assert not rest["return_final_states"]
        return torch.zeros_like(x)

    def zeros(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rest: Any) -> Any:
        return torch.zeros_like(value), None

    code = sys.modules[type(model).__module__]
    if hasattr(code, "torch_chunk_gated_delta_rule"):
        monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", zeros)
    if hasattr(code, "mamba2_chunk_scan"):
        monkeypatch.setattr(code, "mamba2_chunk_scan", no_scan)
