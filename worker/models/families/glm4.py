"""GLM-4-0414: half of each head rotates, in interleaved pairs; norms before and after each part."""

from dataclasses import replace
from typing import Final

from worker.models.config_reader import ConfigReader
from worker.models.families import glm
from worker.models.families.base import Family, Gguf, ModelSpec, add_partially_rotated_heads
from worker.models.layout import LayerNorms

_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    attention_post=("post_self_attn_layernorm", "post_attention_norm"),
    mlp=("post_attention_layernorm", "ffn_norm"),
    mlp_post=("post_mlp_layernorm", "post_ffw_norm"),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return GLM's spec with norms after each part, too."""
    return replace(glm.spec(config), norms=_NORMS)


FAMILY = Family(
    models={"Glm4ForCausalLM": "GLM-4-0414"},
    model_types=("glm4",),
    spec=spec,
    gguf=Gguf(name="glm4", add_heads=add_partially_rotated_heads),
)
