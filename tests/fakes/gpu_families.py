"""Small configurations of every model family with heads that GPU kernels have."""

from typing import Any

VOCAB_SIZE = 96
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = _EXPERTS | {
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_GROUPED = {"n_group": 2, "topk_group": 1}
_WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_QWEN_EXPERTS: dict[str, Any] = _EXPERTS | {
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
_MAMBA_ALONE: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 16,
    "max_position_embeddings": 64,
}


def _family(architecture: str, **keys: Any) -> dict[str, Any]:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    return _LLAMA | {"architectures": [architecture], "model_type": model_type} | keys


FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": _family("Cohere2ForCausalLM", **_WINDOWED),
    "gemma2": _family("Gemma2ForCausalLM", hidden_activation="gelu_pytorch_tanh", **_WINDOWED),
    "ernie45": _family("Ernie4_5ForCausalLM", model_type="ernie4_5"),
    "exaone4": _family("Exaone4ForCausalLM", **_WINDOWED),
    "glm": _family("GlmForCausalLM"),
    "glm4": _family("Glm4ForCausalLM"),
    "gptoss": _family(
        "GptOssForCausalLM",
        **_WINDOWED,
        model_type="gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    ),
    "granite": _family("GraniteForCausalLM", logits_scaling=8.0),
    "ministral": _family("MinistralForCausalLM", **_WINDOWED),
    "ministral3": _family(
        "Ministral3ForCausalLM",
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "olmo2": _family("Olmo2ForCausalLM"),
    "olmo3": _family("Olmo3ForCausalLM", **_WINDOWED),
    "phi3": _family("Phi3ForCausalLM", partial_rotary_factor=0.75),
    "seedoss": _family("SeedOssForCausalLM", model_type="seed_oss"),
    "smollm3": _family("SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
    "starcoder2": _family("Starcoder2ForCausalLM", hidden_act="gelu_pytorch_tanh"),
    "mixtral": _family("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "olmoe": _family("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "granitemoe": _family("GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _family(
        "Qwen2MoeForCausalLM",
        **_EXPERTS,
        model_type="qwen2_moe",
        num_experts=4,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_moe": _family("Qwen3MoeForCausalLM", **_EXPERTS, model_type="qwen3_moe", num_experts=4),
    "glm4_moe": _family(
        "Glm4MoeForCausalLM",
        **_EXPERTS,
        model_type="glm4_moe",
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        partial_rotary_factor=0.5,
    ),
    "deepseek2": _family(
        "DeepseekV2ForCausalLM", **_LATENT | {"q_lora_rank": None}, model_type="deepseek_v2"
    ),
    "deepseek3": _family("DeepseekV3ForCausalLM", **_LATENT, **_GROUPED, model_type="deepseek_v3"),
    "glm4moelite": _family(
        "Glm4MoeLiteForCausalLM", **_LATENT, **_GROUPED, model_type="glm4_moe_lite"
    ),
    "qwen3next": _family(
        "Qwen3NextForCausalLM", **_DELTA, **_QWEN_EXPERTS, model_type="qwen3_next"
    ),
    "qwen35": _family("Qwen3_5ForCausalLM", **_DELTA, model_type="qwen3_5_text"),
    "qwen35moe": _family(
        "Qwen3_5MoeForCausalLM", **_DELTA, **_QWEN_EXPERTS, model_type="qwen3_5_moe_text"
    ),
    "bamba": _family("BambaForCausalLM", **_MAMBA, attn_layer_indices=[1]),
    "falconh1": _family("FalconH1ForCausalLM", **_MAMBA, model_type="falcon_h1"),
    "granitehybrid": _family(
        "GraniteMoeHybridForCausalLM",
        **_MAMBA,
        model_type="granitemoehybrid",
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
    ),
    "lfm2": _family("Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
    "lfm2moe": _family(
        "Lfm2MoeForCausalLM",
        **_EXPERTS,
        model_type="lfm2_moe",
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        num_experts=4,
    ),
    "mamba2": _MAMBA_ALONE,
    "nemotronh": _family(
        "NemotronHForCausalLM",
        model_type="nemotron_h",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "full_attention", "mlp", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=48,
        mlp_hidden_act="relu2",
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
    "qwen2": _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": _LLAMA | _QWEN3,
    "gemma3": _LLAMA | _GEMMA3,
}
