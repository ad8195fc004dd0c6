"""OLMo 2: a norm after each part instead of before it, and one over all query and all key heads."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec
from worker.models.layout import POST_NORMS


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` gives all four projections of the attention a bias."""
    from worker.models.common import attention_decoder, llama_attention

    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias", False)), joint_qk_norm=True
    )
    return replace(attention_decoder(config, attention), norms=POST_NORMS)


FAMILY = Family(
    models={"Olmo2ForCausalLM": "OLMo 2"},
    model_types=("olmo2",),
    spec=spec,
    gguf=Gguf(name="olmo2"),
)
