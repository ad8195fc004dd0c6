"""OLMo 2: a norm after each part instead of before it, and one over all query and all key heads."""

from worker.models.common import llama_like
from worker.models.config_reader import ConfigReader
from worker.models.spec import POST_NORMS, ModelSpec

MODEL_TYPE = "olmo2"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` gives all four projections of the attention a bias."""
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="Olmo2ForCausalLM",
        attention={"qkv_bias": bias, "output_bias": bias, "joint_qk_norm": True},
        norms=POST_NORMS,
    )
