"""Seed-OSS: Llama's layers with biases of their own for the inputs and the output of attention."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import QUERY_BIAS, Family, Gguf, ModelSpec
from worker.models.layout import QWEN_NORMS


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` is for queries, keys and values."""
    from worker.models.common import attention_decoder, llama_attention

    attention = replace(
        llama_attention(config, head_dim=config.integer("head_dim", 128)),
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias", False),
    )
    return replace(attention_decoder(config, attention), norms=QWEN_NORMS)


FAMILY = Family(
    models={"SeedOssForCausalLM": "Seed-OSS"},
    model_types=("seed_oss",),
    spec=spec,
    gguf=Gguf(
        name="seed_oss",
        flags={"attention_bias": QUERY_BIAS, "attention_out_bias": "blk.0.attn_output.bias"},
    ),
)
