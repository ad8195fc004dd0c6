"""Model configurations to specs: both spellings of rope, refusals that name key and value."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from proto.errors import ModelError
from proto.messages.prepared_model import TensorIndex
from tests.fakes.prepared_models import prepare, spec_of
from tests.fakes.tiny_checkpoints import CONFIGS, architecture_of
from worker.models.attention import AttentionSpec
from worker.models.config_reader import ConfigReader
from worker.models.mlp import MlpSpec
from worker.models.registry import spec_from_config
from worker.models.rope import DefaultRope, FactorsRope, LinearRope, Llama3Rope, NoRope, YarnRope

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def family(architecture: str, **keys: Any) -> dict[str, Any]:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    return LLAMA | {"architectures": [architecture], "model_type": model_type} | keys


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_written_by_transformers_are_accepted(name: str) -> None:
    config = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    spec = spec_from_config(config | {"architectures": [architecture_of(CONFIGS[name])]})
    assert spec.num_layers == CONFIGS[name].num_hidden_layers
    assert spec.vocab_size == 96
    assert {mixer.shape.num_heads for mixer in spec.attention_layers} <= {4}


def test_the_family_of_the_recipe() -> None:
    """The file in docs/extending.md, with its names and nothing else."""
    page = Path(__file__).parents[3] / "docs" / "extending.md"
    (source,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    module: dict[str, Any] = {"__name__": "worker.models.families.foo"}
    exec(compile(source, "foo.py", "exec"), module)
    found = module["FAMILY"]
    assert (found.module, found.gguf_names) == ("foo", ("foo",))
    config = ConfigReader(family("FooForCausalLM", layer_norm_eps=1e-3))
    spec, llama = found.spec(config), spec_from_config(LLAMA)
    config.refuse_unread_keys()
    assert (spec.architecture, spec.norm_type, spec.norm_eps) == ("FooForCausalLM", "layer", 1e-3)
    assert spec.weights().keys() == llama.weights().keys()


def test_a_full_llama_configuration() -> None:
    spec = spec_from_config(LLAMA)
    assert spec.architecture == "LlamaForCausalLM"
    attention = spec.attention_layers[0]
    assert (attention.head_dim, attention.query_size, attention.kv_size) == (16, 64, 32)
    assert spec.ropes == (DefaultRope(10_000.0),) * 2
    assert spec.windows == (None, None)
    assert not any((attention.qkv_bias, attention.output_bias, attention.qk_norm))
    assert not spec.tied_embeddings
    assert spec.layers[0].mlp == MlpSpec(hidden_size=64, intermediate_size=112)


def attention_of(config: dict[str, Any]) -> AttentionSpec:
    return spec_from_config(config).attention_layers[0]


def test_families_set_their_own_options() -> None:
    mistral = attention_of(family("MistralForCausalLM", sliding_window=None))
    qwen2 = attention_of(family("Qwen2ForCausalLM", sliding_window=64))
    qwen3 = attention_of(family("Qwen3ForCausalLM", attention_bias=True))
    assert (mistral.rope_interleaved_in, mistral.qkv_bias) == (("gguf",), False)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.rope_interleaved_in) == (True, False, ())
    assert (qwen3.qk_norm, qwen3.output_bias, qwen3.head_dim) == (True, True, 128)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2}, LinearRope(5000.0, 2.0)),
        ({"rope_type": "default"}, DefaultRope(5000.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            Llama3Rope(5000.0, 8.0, 1.0, 4.0, 32),
        ),
        (
            {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32},
            YarnRope(5000.0, 1.0, 32, 32.0, 1.0, True, 1.0),
        ),
    ],
)
def test_both_spellings_of_rope_scaling_are_accepted(
    scaling: dict[str, Any], expected: Any
) -> None:
    older = LLAMA | {"rope_theta": 5000.0, "rope_scaling": scaling}
    newer = LLAMA | {"rope_parameters": scaling | {"rope_theta": 5000.0}}
    assert spec_from_config(older).ropes == (expected,) * 2
    assert spec_from_config(newer).ropes == (expected,) * 2


def test_a_null_rope_scaling_is_none() -> None:
    config = LLAMA | {"rope_theta": 5000.0, "rope_scaling": None}
    assert spec_from_config(config).ropes == (DefaultRope(5000.0),) * 2


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 64,
                    "short_factor": [1.0] * 8,
                    "long_factor": [1.0] * 7 + ["2"],
                }
            },
            "long_factor = [1.0,",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 64,
                    "short_factor": [1.0],
                    "long_factor": [2.0],
                }
            },
            "8 factors are needed",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta = 0.1",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor = None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "ntk_alpha": 1}}, "ntk_alpha"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
        ({"mlp_bias": 1}, "mlp_bias = 1"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attention_sink": True}, "attention_sink = True"),
        ({"sliding_window": 64}, "sliding_window = 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"model_type": "qwen2"}, "model_type = 'qwen2'"),
        (
            {"architectures": ["PhiForCausalLM"]},
            "PhiForCausalLM is not supported; supported: BambaForCausalLM, BertModel",
        ),
        ({"architectures": None}, "architectures = None"),
    ],
)
def test_unsupported_settings_are_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(LLAMA | keys)
    assert named in str(caught.value)


UPPER = {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}
ALTERNATING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (family("MistralForCausalLM", sliding_window=100), (100, 100)),
        (family("MistralForCausalLM", sliding_window=128), (None, None)),
        (family("Qwen2ForCausalLM", **UPPER), (None, 100)),
        (family("Qwen2ForCausalLM", **UPPER | {"max_window_layers": 0}), (100, 100)),
        (family("Qwen2ForCausalLM", **UPPER | {"max_window_layers": None}), (None, None)),
        (family("Qwen2ForCausalLM", **UPPER | {"use_sliding_window": False}), (None, None)),
        (family("Qwen3ForCausalLM", **UPPER, layer_types=ALTERNATING), (100, None)),
    ],
)
def test_sliding_windows_by_layer(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert spec_from_config(config).windows == windows


GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 7,
    "sliding_window": 16,
}


def test_gemma3_defaults_replace_missing_keys() -> None:
    spec = spec_from_config(GEMMA3)
    assert spec.windows == (16,) * 5 + (None, 16)
    local, everywhere = DefaultRope(10_000.0), DefaultRope(1_000_000.0)
    assert spec.ropes == (local,) * 5 + (everywhere, local)
    assert (spec.attention_shape.head_dim, spec.attention_shape.scale, spec.embedding_scale) == (
        256,
        1 / 16,
        8.0,
    )
    assert spec.tied_embeddings


PHI3 = family("Phi3ForCausalLM", sliding_window=2047, rope_theta=5000.0)
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
LATENT = LLAMA | {
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "routed_scaling_factor": 2.5,
    "seq_aux": True,
    "v_head_dim": 8,
}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "type": "yarn",
}
DEEPSEEK_V3 = LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rope_scaling": DEEPSEEK_YARN,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
}
QWEN_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}
QWEN_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 16,
}
QWEN_35: dict[str, Any] = QWEN_DELTA | {
    "attn_output_gate": True,
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}
MAMBA = {
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_proj_bias": False,
}
SHIPPED: dict[str, dict[str, Any]] = {
    "Bamba": family(
        "BambaForCausalLM",
        **MAMBA,
        attention_bias=False,
        attn_layer_indices=[1],
        attn_rotary_emb=8,
        mlp_bias=False,
        num_logits_to_keep=1,
        rope_scaling=None,
        rope_theta=10000.0,
    ),
    "Falcon-H1": family(
        "FalconH1ForCausalLM",
        **MAMBA,
        model_type="falcon_h1",
        attention_in_multiplier=1.0,
        attention_out_multiplier=0.9375,
        attn_layer_indices=None,
        embedding_multiplier=5.6,
        head_dim=16,
        key_multiplier=0.39,
        lm_head_multiplier=0.0195,
        mamba_d_ssm=128,
        mamba_norm_before_gate=False,
        mamba_rms_norm=False,
        mamba_use_mlp=True,
        mlp_bias=False,
        mlp_expansion_factor=8,
        mlp_multipliers=[0.88, 0.58],
        projectors_bias=False,
        rope_theta=100000000000.0,
        ssm_in_multiplier=1.25,
        ssm_multipliers=[0.35, 0.25, 0.35, 0.5, 0.35],
        ssm_out_multiplier=0.23,
        time_step_floor=0.0001,
        time_step_limit=[0.0, math.inf],
        time_step_max=0.1,
        time_step_min=0.001,
    ),
    "Granite 4 hybrid": family(
        "GraniteMoeHybridForCausalLM",
        **MAMBA,
        attention_bias=False,
        attention_multiplier=0.0078125,
        embedding_multiplier=12,
        init_method="mup",
        layer_types=["mamba", "attention"],
        logits_scaling=8,
        normalization_function="rmsnorm",
        num_experts_per_tok=0,
        num_local_experts=0,
        position_embedding_type="nope",
        residual_multiplier=0.22,
        rope_scaling=None,
        rope_theta=10000,
        router_aux_loss_coef=0.01,
        shared_intermediate_size=112,
        tie_word_embeddings=True,
    ),
    "LFM2": family(
        "Lfm2ForCausalLM",
        block_auto_adjust_ff_dim=True,
        block_dim=64,
        block_ff_dim=112,
        block_ffn_dim_multiplier=1.0,
        block_mlp_init_scale=1.0,
        block_multiple_of=16,
        block_norm_eps=1e-5,
        block_out_init_scale=1.0,
        block_use_swiglu=True,
        block_use_xavier_init=True,
        conv_L_cache=3,
        conv_bias=False,
        conv_dim=64,
        conv_dim_out=64,
        conv_use_xavier_init=True,
        full_attn_idxs=[1],
        norm_eps=1e-5,
        num_heads=4,
        rope_theta=1000000.0,
        theta=1000000.0,
        use_pos_enc=True,
    ),
    "Nemotron-H": family(
        "NemotronHForCausalLM",
        model_type="nemotron_h",
        attention_bias=False,
        chunk_size=128,
        conv_kernel=4,
        expand=2,
        head_dim=16,
        hidden_act=None,
        hidden_dropout=0.0,
        hybrid_override_pattern="M*",
        layer_norm_epsilon=1e-5,
        mamba_head_dim=16,
        mamba_hidden_act="silu",
        mamba_num_heads=8,
        mamba_proj_bias=False,
        mlp_bias=False,
        mlp_hidden_act="relu2",
        n_groups=2,
        num_logits_to_keep=1,
        rescale_prenorm_residual=True,
        residual_in_fp32=False,
        sliding_window=None,
        ssm_state_size=16,
        time_step_limit=[0.0, math.inf],
        use_bias=False,
        use_conv_bias=True,
        use_mamba_kernels=True,
    ),
    "Command R7B": family(
        "Cohere2ForCausalLM",
        layer_switch=4,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        sliding_window=16,
        sliding_window_pattern=4,
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=True,
    ),
    "DeepSeek-V2-Lite": LATENT
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "aux_loss_alpha": 0.001,
        "model_type": "deepseek_v2",
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "DeepSeek-V3": DEEPSEEK_V3,
    "GLM-4.7-Flash": LATENT
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    },
    "Gemma 2 27B": family(
        "Gemma2ForCausalLM",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window_size=16,
        sliding_window=16,
    ),
    "Kimi K2": DEEPSEEK_V3
    | {
        "model_type": "kimi_k2",
        "n_group": 1,
        "num_nextn_predict_layers": 0,
        "rope_scaling": DEEPSEEK_YARN | {"beta_fast": 1.0, "factor": 32.0},
        "topk_group": 1,
    },
    "Phi-4-mini": PHI3
    | {
        "full_attn_mod": 1,
        "lm_head_bias": False,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_scaling": LONGROPE,
    },
    "Qwen3-Next": family(
        "Qwen3NextForCausalLM",
        **QWEN_DELTA,
        model_type="qwen3_next",
        attention_bias=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        partial_rotary_factor=0.25,
        rope_scaling=None,
        rope_theta=10000000,
        **QWEN_EXPERTS,
    ),
    "Qwen 3.5": family("Qwen3_5ForCausalLM", **QWEN_35, model_type="qwen3_5_text"),
    "Qwen 3.5 with experts": family(
        "Qwen3_5MoeForCausalLM", **QWEN_35, **QWEN_EXPERTS, model_type="qwen3_5_moe_text"
    ),
    "SmolLM3": family("SmolLM3ForCausalLM", max_window_layers=28, use_sliding_window=False),
    "StarCoder 2": family(
        "Starcoder2ForCausalLM",
        activation_function="gelu",
        hidden_act="gelu_pytorch_tanh",
        norm_type="layer_norm",
        sliding_window=16,
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_configurations_as_they_are_published(name: str) -> None:
    assert spec_from_config(SHIPPED[name]).num_layers == 2


@pytest.mark.parametrize(("longest", "factor"), [(None, 4.0), (64, 1.0), (65, 4.0)])
def test_the_longest_request_selects_the_factors_of_longrope(
    longest: int | None, factor: float
) -> None:
    (rope, _) = spec_from_config(SHIPPED["Phi-4-mini"], longest).ropes
    assert isinstance(rope, FactorsRope)
    assert rope.factors == (factor,) * 6
    assert rope.attention_factor == pytest.approx((1 + math.log(2) / math.log(64)) ** 0.5)


@pytest.mark.parametrize(("longest", "growth"), [(None, 0.1), (64, 0.0), (65, 0.1)])
def test_queries_grow_beyond_the_length_that_yarn_extends(
    longest: int | None, growth: float
) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config = family("Ministral3ForCausalLM", rope_parameters=rope | {"llama_4_scaling_beta": 0.1})
    (found, _) = spec_from_config(config, longest).ropes
    assert isinstance(found, YarnRope)
    assert found.query_growth == growth


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [("LLG", (9, 9, None, 9, None)), (2, (9, None, 9, None, 9)), (None, (9, 9, 9, None, 9))],
)
def test_the_pattern_of_exaone_says_which_layers_have_a_window(
    pattern: str | int | None, windows: tuple[int | None, ...]
) -> None:
    config = family(
        "Exaone4ForCausalLM",
        num_hidden_layers=5,
        sliding_window=9,
        sliding_window_pattern=pattern,
    )
    spec = spec_from_config(config)
    assert spec.windows == windows
    assert [rope == NoRope() for rope in spec.ropes] == [window is None for window in windows]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (family("Cohere2ForCausalLM", use_parallel_block=False), "use_parallel_block = False"),
        (
            family("Gemma2ForCausalLM", hidden_act=None, final_logit_softcapping=-1),
            "final_logit_softcapping = -1",
        ),
        (family("Glm4ForCausalLM", partial_rotary_factor=0.4), "partial_rotary_factor = 0.4"),
        (
            family("Exaone4ForCausalLM", sliding_window=9, sliding_window_pattern="LX"),
            "sliding_window_pattern = 'LX'",
        ),
        (
            family("Ministral3ForCausalLM", rope_parameters={"llama_4_scaling_beta": 0.1}),
            "llama_4_scaling_beta = 0.1",
        ),
        (family("GraniteForCausalLM", residual_multiplier=0), "residual_multiplier = 0"),
        (family("Olmo2ForCausalLM", clip_qkv=8.0), "clip_qkv = 8.0"),
        (PHI3 | {"lm_head_bias": True}, "lm_head_bias = True"),
        (family("SmolLM3ForCausalLM", no_rope_layers=[1]), "no_rope_layers = [1]"),
        (family("Starcoder2ForCausalLM", hidden_act="relu"), "hidden_act = 'relu'"),
    ],
)
def test_dense_families_refuse_unsupported_settings(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(config)
    assert named in str(caught.value)


def test_a_window_of_the_models_length_keeps_the_local_rope() -> None:
    spec = spec_from_config(GEMMA3 | {"sliding_window": 128})
    assert set(spec.windows) == {None}
    assert len(set(spec.ropes)) == 2


def test_both_spellings_of_two_ropes_are_accepted() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 5.0, "rope_local_base_freq": 7.0, "rope_scaling": linear}
    newer = {
        "rope_parameters": {
            "full_attention": linear | {"rope_theta": 5.0},
            "sliding_attention": {"rope_theta": 7.0},
        }
    }
    ropes = (DefaultRope(7.0),) * 5 + (LinearRope(5.0, 8.0), DefaultRope(7.0))
    assert spec_from_config(GEMMA3 | older).ropes == ropes
    assert spec_from_config(GEMMA3 | newer).ropes == ropes


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"layer_types": ["full_attention"]}, "7 names are needed"),
        ({"layer_types": ["chunked_attention"] * 7}, "layer_types = 'chunked_attention'"),
        ({"rope_parameters": {"linear_attention": {}}}, "linear_attention"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta = 1000000.0"),
    ],
)
def test_gemma3_refuses_unsupported_settings(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(GEMMA3 | keys)
    assert named in str(caught.value)


def test_unused_keys_are_accepted() -> None:
    spec_from_config(
        LLAMA
        | {
            "attention_dropout": 0.1,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "rope_interleaved": False,
            "is_llama_config": True,
            "partial_rotary_factor": 1.0,
            "transformers_version": "4.42.3",
            "torch_dtype": "bfloat16",
            "eos_token_id": [2, 3],
        }
    )


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, LLAMA, TensorIndex("safetensors", (), ()))
    assert spec_of(prepared).hidden_size == 64
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelError, match=r"config\.json"):
        spec_of(prepared)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        spec_of(prepared)
