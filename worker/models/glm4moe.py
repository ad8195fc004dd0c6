"""GLM-4.5 and 4.6: sigmoid scores with a bias for the choice of experts, and shared experts."""

from typing import Final

from worker.models.common import dense_and_sparse, llama_like, router_from_config
from worker.models.config_reader import ConfigReader
from worker.models.moe import MoeSpec
from worker.models.spec import LayerNorms, ModelSpec

MODEL_TYPE = "glm4_moe"
_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    mlp=("post_attention_layernorm", "post_attention_norm"),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the first `first_k_dense_replace` layers have no experts.

    Layers that predict further tokens (`num_nextn_predict_layers`) are not loaded.
    """
    config.must_be("hidden_act", "silu", "swish")
    inner = config.integer("moe_intermediate_size")
    router = router_from_config(
        config,
        scoring="sigmoid",
        selection_bias=True,
        normalised=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    mixture = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=inner,
        router=router,
        shared_size=inner * config.integer("n_shared_experts", 1, least=0),
    )
    num_dense = config.integer("first_k_dense_replace", 1, least=0)
    return llama_like(
        config,
        architecture="Glm4MoeForCausalLM",
        partial_rotary_factor=0.5,
        attention={
            "qkv_bias": config.flag("attention_bias", False),
            "qk_norm": config.flag("use_qk_norm", False),
        },
        mlps=dense_and_sparse(config, mixture, lambda layer: layer >= num_dense),
        norms=_NORMS,
        num_unused_layers=config.integer("num_nextn_predict_layers", 0, least=0),
    )
