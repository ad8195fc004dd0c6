"""Tiny random checkpoints of every family, made by transformers from a configuration."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GPT_OSS: dict[str, Any] = {
    "intermediate_size": 96,  # whole blocks of MXFP4
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "rope_parameters": _YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}

_WINDOW = {"sliding_window": 7}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 5,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
_MAMBA_TYPES: dict[str, Any] = _MAMBA | {
    "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"]
}
_NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": None,
    "layers_block_type": [
        *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
        *("linear_attention", "full_attention"),
    ],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "time_step_min": 1e-30,  # transformers limits the time step of prompts, but not that of decodes
}
_CONVS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
_GEMMA3: dict[str, Any] = _SIZES | {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    **_WINDOW,
}

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GLM4_MOE: dict[str, Any] = _EXPERTS | {"n_routed_experts": 6, "head_dim": 16, "pad_token_id": 0}

_LATENT: dict[str, Any] = _EXPERTS | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "pad_token_id": 0,
}
_MSCALE = _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}

_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [2.0 + pair for pair in range(6)],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
_KINDS: dict[str, Any] = _WINDOW | {"layer_types": _GEMMA3["layer_types"]}

CONFIGS: dict[str, PretrainedConfig] = {
    "bamba": BambaConfig(**_SIZES | _MAMBA, attn_layer_indices=[1, 4]),
    "bamba-biases": BambaConfig(
        **_SIZES | _MAMBA | {"mamba_n_groups": 1},
        attn_layer_indices=[2],
        attention_bias=True,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        mlp_bias=True,
    ),
    "falconh1": FalconH1Config(
        **_SIZES | _MAMBA | {"mamba_n_groups": 1},
        mamba_d_ssm=128,
        embedding_multiplier=2.5,
        lm_head_multiplier=0.5,
        key_multiplier=0.7,
        attention_in_multiplier=0.9,
        attention_out_multiplier=0.6,
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.8,
        ssm_multipliers=[0.5, 0.9, 1.2, 1.1, 0.8],
        mlp_multipliers=[0.9, 0.5],
    ),
    "falconh1-norms": FalconH1Config(
        **_SIZES | _MAMBA,
        mamba_d_ssm=None,
        mamba_rms_norm=True,
        attention_bias=True,
        projectors_bias=True,
        attention_in_multiplier=0.9,
        ssm_out_multiplier=0.8,
    ),
    "granitehybrid": GraniteMoeHybridConfig(
        **_SIZES | _MAMBA_TYPES | {"mamba_n_groups": 1},
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=80,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
        pad_token_id=0,
    ),
    "granitehybrid-dense": GraniteMoeHybridConfig(
        **_SIZES | _MAMBA_TYPES,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=112,
        position_embedding_type="rope",
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    "lfm2": Lfm2Config(**_SIZES | _CONVS, block_multiple_of=16),
    "lfm2-biases": Lfm2Config(
        **_SIZES | _CONVS,
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
        conv_L_cache=4,
        tie_word_embeddings=False,
    ),
    "lfm2moe": Lfm2MoeConfig(
        **_SIZES | _CONVS,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        routed_scaling_factor=1.5,
    ),
    "mamba2": Mamba2Config(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        state_size=16,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "mamba2-biases": Mamba2Config(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=32,
        n_groups=1,
        state_size=12,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "nemotronh": NemotronHConfig(**_SIZES | _NEMOTRON),
    "nemotronh-experts": NemotronHConfig(
        **_SIZES
        | _NEMOTRON
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"]},
        **_EXPERTS,
        n_routed_experts=6,
        n_group=2,
        topk_group=1,
        moe_latent_size=32,
        moe_shared_expert_intermediate_size=80,
        routed_scaling_factor=2.5,
    ),
    "cohere2": Cohere2Config(**_SIZES | _KINDS, logit_scale=0.5, pad_token_id=0),
    "cohere2-biases": Cohere2Config(
        **_SIZES, sliding_window=5, attention_bias=True, logit_scale=0.5, pad_token_id=0
    ),
    "deepseek2": DeepseekV2Config(
        **_SIZES | _LATENT,
        q_lora_rank=None,
        first_k_dense_replace=1,
        rope_parameters=_MSCALE,
        routed_scaling_factor=1.5,
    ),
    "deepseek2-groups": DeepseekV2Config(
        **_SIZES | _LATENT,
        q_lora_rank=48,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        attention_bias=True,
    ),
    "deepseek3": DeepseekV3Config(
        **_SIZES | _LATENT,
        q_lora_rank=48,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        rope_parameters=_MSCALE | {"mscale": 1.5},
    ),
    "deepseek3-halves": DeepseekV3Config(
        **_SIZES | _LATENT,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        first_k_dense_replace=2,
        num_mtp_layers=0,
        rope_interleave=False,
        tie_word_embeddings=True,
    ),
    "glm4moelite": Glm4MoeLiteConfig(
        **_SIZES | _LATENT, q_lora_rank=48, mlp_layer_types=["sparse", "dense", "sparse"]
    ),
    "gemma2": Gemma2Config(
        **_SIZES | _WINDOW,
        head_dim=32,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "gemma2-uncapped": Gemma2Config(
        **_SIZES, head_dim=32, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "ernie45": Ernie4_5Config(**_SIZES, head_dim=32, pad_token_id=0),
    "ernie45-biases": Ernie4_5Config(
        **_SIZES, head_dim=16, use_bias=True, tie_word_embeddings=False, pad_token_id=0
    ),
    "exaone4": Exaone4Config(**_SIZES | _KINDS),
    "exaone4-without-windows": Exaone4Config(
        **_SIZES, sliding_window=None, layer_types=["full_attention"] * 3, rope_parameters=_LLAMA3
    ),
    "glm": GlmConfig(**_SIZES, head_dim=32, pad_token_id=0),
    "glm-without-biases": GlmConfig(
        **_SIZES, head_dim=16, attention_bias=False, tie_word_embeddings=True, pad_token_id=0
    ),
    "glm4": Glm4Config(**_SIZES, head_dim=16, pad_token_id=0),
    "glm4-without-biases": Glm4Config(
        **_SIZES, head_dim=32, attention_bias=False, tie_word_embeddings=True, pad_token_id=0
    ),
    "glm4moe": Glm4MoeConfig(**_SIZES | _GLM4_MOE, use_qk_norm=True, attention_bias=True),
    "glm4moe-groups": Glm4MoeConfig(
        **_SIZES | _GLM4_MOE | {"n_routed_experts": 8},
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=False,
    ),
    "gptoss": GptOssConfig(**_SIZES | _WINDOW | _GPT_OSS),
    "gptoss-full": GptOssConfig(
        **_SIZES | _GPT_OSS | {"num_experts_per_tok": 5, "num_key_value_heads": 4},
        layer_types=["full_attention"] * 3,
        attention_bias=False,
    ),
    "granitemoe": GraniteMoeConfig(
        **_SIZES,
        num_local_experts=6,
        embedding_multiplier=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.2,
        logits_scaling=0.5,
    ),
    "granite": GraniteConfig(
        **_SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.2,
        logits_scaling=0.5,
    ),
    "granite-biases": GraniteConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "ministral": MinistralConfig(**_SIZES | _KINDS, head_dim=24),
    "ministral3": Ministral3Config(
        **_SIZES, head_dim=32, rope_parameters=_YARN | {"llama_4_scaling_beta": 0.5}
    ),
    "ministral3-window": Ministral3Config(
        **_SIZES | _WINDOW,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters=_YARN
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16.0, "beta_slow": 2.0}
        | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1},
    ),
    "olmoe": OlmoeConfig(**_SIZES, num_experts=6, num_experts_per_tok=2),
    "olmoe-biases": OlmoeConfig(
        **_SIZES,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "olmo2": Olmo2Config(**_SIZES),
    "olmo2-biases": Olmo2Config(**_SIZES, attention_bias=True, tie_word_embeddings=True),
    "olmo3": Olmo3Config(
        **_SIZES | _KINDS,
        rope_parameters={
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "phi3": Phi3Config(**_SIZES, pad_token_id=0),
    "phi3-window": Phi3Config(**_SIZES | _WINDOW, pad_token_id=0),
    "phi3-longrope": Phi3Config(
        **_SIZES, original_max_position_embeddings=16, rope_parameters=_LONGROPE, pad_token_id=0
    ),
    "seedoss": SeedOssConfig(**_SIZES, head_dim=32),
    "seedoss-output-biases": SeedOssConfig(
        **_SIZES, head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "smollm3": SmolLM3Config(**_SIZES, no_rope_layers=[1, 0, 1], pad_token_id=0),
    "smollm3-window": SmolLM3Config(
        **_SIZES | _WINDOW,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        attention_bias=True,
        pad_token_id=0,
    ),
    "starcoder2": Starcoder2Config(**_SIZES),
    "starcoder2-window": Starcoder2Config(
        **_SIZES | _WINDOW, use_bias=False, tie_word_embeddings=False
    ),
    "gemma3": Gemma3TextConfig(**_GEMMA3),
    "gemma3-pattern-untied": Gemma3TextConfig(
        **_GEMMA3 | {"layer_types": None, "sliding_window_pattern": 2},
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma3-linear": Gemma3TextConfig(
        **_GEMMA3,
        rope_parameters={
            "full_attention": _LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama": LlamaConfig(**_SIZES),
    "llama-tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**_SIZES, attention_bias=True),
    "llama-llama3": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "llama-linear": LlamaConfig(**_SIZES, rope_parameters=_LINEAR),
    "llama-one-kv-head": LlamaConfig(**_SIZES | {"num_key_value_heads": 1}),
    "mistral": MistralConfig(**_SIZES, sliding_window=None),
    "mistral-wide-heads": MistralConfig(**_SIZES, sliding_window=None, head_dim=24),
    "mistral-window": MistralConfig(**_SIZES, **_WINDOW),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": MixtralConfig(**_SIZES, **_WINDOW, num_local_experts=3),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen2-window": Qwen2Config(**_SIZES, **_WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen2-tied-yarn": Qwen2Config(**_SIZES, tie_word_embeddings=True, rope_parameters=_YARN),
    "qwen2-yarn-mscale": Qwen2Config(
        **_SIZES,
        rope_parameters=_YARN
        | {"mscale": 1.5, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    "qwen2-yarn-fractional": Qwen2Config(
        **_SIZES, rope_parameters=_YARN | {"truncate": False, "attention_factor": 0.8}
    ),
    "qwen2moe": Qwen2MoeConfig(
        **_SIZES, **_EXPERTS, num_experts=6, shared_expert_intermediate_size=96
    ),
    "qwen2moe-window": Qwen2MoeConfig(
        **_SIZES | _EXPERTS | _WINDOW,
        num_experts=5,
        shared_expert_intermediate_size=32,
        norm_topk_prob=True,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    "qwen3": Qwen3Config(**_SIZES, head_dim=32),
    "qwen3-yarn": Qwen3Config(**_SIZES, head_dim=32, rope_parameters=_YARN),
    "qwen3-window": Qwen3Config(
        **_SIZES, **_WINDOW, head_dim=32, use_sliding_window=True, max_window_layers=0
    ),
    "qwen3-biases-tied": Qwen3Config(
        **_SIZES, head_dim=48, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS, head_dim=32, num_experts=6),
    "qwen3moe-dense-layers": Qwen3MoeConfig(
        **_SIZES | _EXPERTS | {"num_experts_per_tok": 3, "num_hidden_layers": 5},
        head_dim=32,
        num_experts=7,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "qwen3next": Qwen3NextConfig(
        **_SIZES | _EXPERTS | _DELTA, num_experts=6, shared_expert_intermediate_size=96
    ),
    "qwen35": Qwen3_5TextConfig(**_SIZES | _DELTA, tie_word_embeddings=True),
    "qwen35-biases": Qwen3_5TextConfig(
        **_SIZES | _DELTA | {"linear_value_head_dim": 40, "linear_num_key_heads": 4},
        attention_bias=True,
    ),
    "qwen35moe": Qwen3_5MoeTextConfig(
        **_SIZES | _EXPERTS | _DELTA, num_experts=6, shared_expert_intermediate_size=32
    ),
}
"""Every family with every variation of the arithmetic that it supports."""


def has_experts(config: PretrainedConfig) -> bool:
    """Return whether a model has mixtures of experts; some only have settings for them."""
    if not getattr(config, "num_experts_per_tok", None):
        return False
    return not isinstance(config, NemotronHConfig) or "moe" in config.layers_block_type


MIXTURES = [name for name, config in CONFIGS.items() if has_experts(config)]
"""Those with experts."""


_LATENT_IN_BLOCKS = {
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 96},
    **{"qk_head_dim": 48, "head_dim": 16},
}


def config_in_blocks(name: str) -> PretrainedConfig:
    """Return a configuration of CONFIGS whose sizes are multiples of 32, for weights in blocks."""
    config = copy.deepcopy(CONFIGS[name])
    config.intermediate_size = 96
    if hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = 64
    if hasattr(config, "shared_intermediate_size"):
        config.shared_intermediate_size = 96
    if hasattr(config, "kv_lora_rank"):
        latent = _LATENT_IN_BLOCKS | {"q_lora_rank": config.q_lora_rank and 64}
        config = type(config)(**config.to_dict() | latent)
    return config


def architecture_of(config: PretrainedConfig) -> str:
    """Return what `architectures` of a configuration of this type says."""
    return type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"


def tiny_model(config: PretrainedConfig, seed: int = 0) -> Any:
    """Return a transformers model in which every weight, norm and bias affects the logits."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("norm.weight", "norm_f.weight")):
                weight.copy_(1.0 + 0.3 * noise)
            elif name.endswith(("bias", "sinks", "A_log", ".D")):
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):  # of a router
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def save_tiny(name: str, folder: Path, **options: Any) -> Any:
    """Create the model of a configuration and save it as a checkpoint in `folder`."""
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(folder, **options)
    return model


def save_mxfp4(model: Any, folder: Path) -> None:
    """Save a gpt-oss as it is published: experts of random MXFP4, whose numbers the model gets."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, weight in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight.clone()
            continue
        experts, columns, rows = weight.shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator).to(torch.uint8)
        weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
