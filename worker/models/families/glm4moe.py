"""GLM-4.5 and 4.6: sigmoid scores with a bias for the choice of experts, and shared experts."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    QUERY_BIAS,
    SIGMOID,
    Family,
    Gguf,
    ModelSpec,
    add_partially_rotated_heads,
)
from worker.models.layout import QWEN_NORMS


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the first `first_k_dense_replace` layers have no experts.

    Layers that predict further tokens (`num_nextn_predict_layers`) are not loaded.
    """
    from worker.models.common import (
        attention_decoder,
        deepseek_mixture,
        dense_and_sparse,
        llama_attention,
        sigmoid_router,
    )

    config.must_be("hidden_act", "silu", "swish")
    mixture = deepseek_mixture(config, sigmoid_router(config), num_shared=1)
    num_dense = config.integer("first_k_dense_replace", 1, least=0)
    attention = replace(
        llama_attention(config, rotary_fraction=0.5),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
    )
    mlps = dense_and_sparse(config, mixture, lambda layer: layer >= num_dense)
    return replace(
        attention_decoder(config, attention, mlps=mlps),
        norms=QWEN_NORMS,
        num_unused_layers=config.integer("num_nextn_predict_layers", 0, least=0),
    )


FAMILY = Family(
    models={"Glm4MoeForCausalLM": "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.5V, GLM-4.6V"},
    model_types=("glm4_moe",),
    spec=spec,
    gguf=Gguf(
        name="glm4moe",
        gating=SIGMOID,
        flags={"attention_bias": QUERY_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        add_heads=add_partially_rotated_heads,
    ),
    wrapped_types=("glm4v_moe_text",),
)
