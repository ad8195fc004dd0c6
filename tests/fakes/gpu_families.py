"""Small configurations of every model family with heads that GPU kernels have."""

from typing import Any

from worker.models.families import FAMILIES

VOCAB_SIZE = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
_HEADS = {"intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2}
_WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_QWEN_EXPERTS = _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}
_LAYERED_EXPERTS = _EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_GROUPED = {"n_group": 2, "topk_group": 1}
_LATENT = _LAYERED_EXPERTS | {
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}

_KEYS: dict[str, dict[str, Any]] = {
    "cohere2": _WINDOWED,
    "gemma2": {"hidden_activation": "gelu_pytorch_tanh", **_WINDOWED},
    "exaone4": _WINDOWED,
    "gptoss": {**_WINDOWED, **_LOCAL_EXPERTS, "rope_parameters": _YARN | {"truncate": False}},
    "granite": {"logits_scaling": 8.0},
    "ministral": _WINDOWED,
    "ministral3": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    "mistral": {"sliding_window": 8},
    "olmo3": _WINDOWED,
    "phi3": {"partial_rotary_factor": 0.75},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma3": {"hidden_activation": "gelu_pytorch_tanh", **_WINDOWED, "head_dim": 256},
    "mixtral": _LOCAL_EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": _LOCAL_EXPERTS,
    "qwen2moe": _QWEN_EXPERTS,
    "qwen3moe": {**_EXPERTS, "num_experts": 4},
    "glm4moe": {**_LAYERED_EXPERTS, **_GROUPED, "partial_rotary_factor": 0.5},
    "deepseek2": {**_LATENT, "q_lora_rank": None},
    "deepseek3": {**_LATENT, **_GROUPED},
    "glm4moelite": {**_LATENT, **_GROUPED},
    "qwen3next": {**_DELTA, **_QWEN_EXPERTS},
    "qwen35": _DELTA,
    "qwen35moe": {**_DELTA, **_QWEN_EXPERTS},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falconh1": _MAMBA,
    "granitehybrid": {
        **_MAMBA,
        **_LOCAL_EXPERTS,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 48,
    },
    "lfm2": _CONVOLUTIONS,
    "lfm2moe": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1, "num_experts": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "nemotronh": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 48,
        "mlp_hidden_act": "relu2",
    },
}
"""What the configuration of a family has beside the sizes of all, by the name of its file."""


def _config(architecture: str) -> dict[str, Any]:
    family = FAMILIES[architecture]
    heads = {} if family.module == "mamba2" else _HEADS
    names = {"architectures": [architecture], "model_type": family.model_types[0]}
    return _SIZES | heads | names | _KEYS.get(family.module, {})


GPU_CONFIGS = {
    family.module: _config(architecture)
    for architecture, family in FAMILIES.items()
    if not family.is_encoder
}
"""A configuration of each family that generates, by the name of its file."""
