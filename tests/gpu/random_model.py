"""Models of real sizes with random weights, created on the device in seconds."""

from typing import Any, Final

import torch

from tests.fakes.prepared_models import build_decoder, shapes_of
from worker.device import Device
from worker.models.decoder import Decoder
from worker.models.spec import ModelSpec

_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "1B": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "8B": _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "latent": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
    },
}
"""Of the shapes of Llama 3.2 1B, Llama 3.1 8B and DeepSeek-V2-Lite, the last without mixtures."""


def random_decoder(spec: ModelSpec, dtype: torch.dtype, device: Device) -> Decoder:
    """A decoder with normal weights of deviation 0.02; norms are ones."""
    shapes = shapes_of(spec)

    def make(name: str) -> torch.Tensor:
        weight = torch.empty(shapes[name], dtype=dtype, device=device.torch_device)
        return weight.fill_(1.0) if name.endswith("norm.weight") else weight.normal_(0.0, 0.02)

    return build_decoder(spec, make, dtype, device)
