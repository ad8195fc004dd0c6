"""Rotary embedding against that of transformers."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from worker.models.config_reader import ConfigReader
from worker.models.rope import DefaultRope, FactorsRope, rope_from_config
from worker.models.rotary import RotaryEmbedding, inverse_frequencies, rotate

KINDS = [
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 1.5,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
]


@pytest.mark.parametrize("scaling", KINDS, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_equal_transformers(scaling: dict[str, object]) -> None:
    values = scaling | {"rope_theta": 500_000.0}
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=values,
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config)
    rope = rope_from_config(ConfigReader({"rope_parameters": values}), 131072)
    frequencies, factor = inverse_frequencies(rope, 128)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0.0)
    assert math.isclose(factor, magnitude, rel_tol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 3, 499, 3, 77])
    heads = torch.randn(5, 6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotary = RotaryEmbedding(DefaultRope(10_000.0), 32, 500, torch.device("cpu"))
    turned = rotate(heads, rotary.at(positions))
    frequencies, _ = inverse_frequencies(DefaultRope(10_000.0), 32)
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)
    expected, _ = apply_rotary_pos_emb(
        heads, heads, angles.cos().to(dtype), angles.sin().to(dtype), unsqueeze_dim=1
    )
    assert (turned.shape, turned.dtype) == (heads.shape, dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(turned, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_three_positions_equal_transformers(interleaved: bool) -> None:
    """The last heads have more frequencies than M-RoPE's interleaved sections reach."""
    cls = Qwen3VLTextRotaryEmbedding if interleaved else Qwen2_5_VLRotaryEmbedding
    for sections, partial in (([3, 3, 2], 1.0), ([4, 2, 2], 1.0), ([2, 1, 1], 0.5)):
        values: dict[str, object] = {"rope_theta": 100.0, "mrope_section": sections}
        values |= {"mrope_interleaved": True} if interleaved else {}
        config = Qwen3VLTextConfig(
            head_dim=int(16 * partial),
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", **values},
        )
        rope = rope_from_config(ConfigReader({"rope_parameters": values}), 64)
        rotary = RotaryEmbedding(rope, 16, 64, torch.device("cpu"), int(16 * partial))
        places = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(2))
        half = int(8 * partial)
        cosines, sines = cls(config)(torch.zeros(1), places[:, None])
        found = rotary.at(places)
        torch.testing.assert_close(found[:, 0, :half], cosines[0, :, :half], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[:, 1, :half], sines[0, :, :half], rtol=1e-6, atol=1e-6)
        assert (found[:, 0, half:] == 1.0).all()
        assert torch.equal(rotary.at(places[:1].expand(3, -1)), rotary.at(places[0]))


def test_strided_heads_are_rotated_like_contiguous_ones() -> None:
    rotary = RotaryEmbedding(DefaultRope(10_000.0), 16, 50, torch.device("cpu"))
    fused = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(1))
    rotation = rotary.at(torch.arange(4))
    before = fused.clone()
    turned = rotate(fused[:, :7], rotation)
    assert turned.is_contiguous()
    torch.testing.assert_close(turned, rotate(before[:, :7].contiguous(), rotation))
    torch.testing.assert_close(fused, before)


def test_rope_factors_divide_the_frequencies() -> None:
    plain, _ = inverse_frequencies(DefaultRope(100.0), 4)
    scaled, magnitude = inverse_frequencies(FactorsRope(100.0, (1.0, 4.0)), 4)
    torch.testing.assert_close(scaled, plain / torch.tensor([1.0, 4.0]))
    assert magnitude == 1.0
