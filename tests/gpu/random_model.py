"""Models of real sizes whose weights are random numbers made on the device, in seconds."""

from typing import Any, Final

import torch

from worker.layers.embedding import DenseTable, Embedding
from worker.layers.linear import make_linear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryEmbedding
from worker.models.decoder import Decoder
from worker.models.kernel_stack import make_stacks
from worker.models.layer_stack import LayerWeights
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
}
"""Of the shapes of Llama 3.2 1B and Llama 3.1 8B."""


def random_decoder(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Every weight is normal with a deviation of 0.02; norms are ones."""

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)

    def norm() -> RMSNorm:
        return RMSNorm(torch.ones(spec.hidden_size, dtype=dtype, device=device), spec.norm_eps)

    rotary = RotaryEmbedding(spec.ropes[0], spec.head_dim, spec.max_position, device)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layers = [
        LayerWeights(
            attention_norm=norm(),
            qkv=make_linear(weight(spec.query_size + 2 * spec.kv_size, hidden)),
            head_norms=(),
            rotary=rotary,
            output=make_linear(weight(hidden, spec.query_size)),
            mlp_norm=norm(),
            gate_up=make_linear(weight(2 * inner, hidden)),
            down=make_linear(weight(hidden, inner)),
        )
        for _ in range(spec.num_layers)
    ]
    table = weight(spec.vocab_size, hidden)
    head = table if spec.tied_embeddings else weight(spec.vocab_size, hidden)
    stacks = make_stacks(spec, layers)
    return Decoder(spec, Embedding(DenseTable(table)), stacks, norm(), make_linear(head))
