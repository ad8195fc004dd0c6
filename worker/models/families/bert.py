"""BERT (Devlin et al., 2018): absolute positions, token types, norms after residual sums."""

import math
from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import NORM_EPS, Family, Gguf, GgufMetadata, ModelSpec
from worker.models.layout import FULL, LayerNorms, layer_kinds
from worker.models.rope import NoRope

_NORMS: Final = LayerNorms(
    attention_sum=("attention.output.LayerNorm", "attn_output_norm"),
    mlp_sum=("output.LayerNorm", "layer_output_norm"),
)
_NAMES: Final = (
    ("model.embed_tokens.", "model.embeddings.word_embeddings."),
    ("model.positions.", "model.embeddings.position_embeddings."),
    ("model.token_types.", "model.embeddings.token_type_embeddings."),
    ("model.input_norm.", "model.embeddings.LayerNorm."),
    ("model.layers.", "model.encoder.layer."),
    (".self_attn.q_proj.", ".attention.self.query."),
    (".self_attn.k_proj.", ".attention.self.key."),
    (".self_attn.v_proj.", ".attention.self.value."),
    (".self_attn.o_proj.", ".attention.output.dense."),
)
_UNUSED: Final = frozenset(
    {
        *("pooler.dense.weight", "pooler.dense.bias"),
        *("model.embeddings.position_ids", "model.embeddings.token_type_ids"),
    }
)
"""A pooler of the folder that is not used, and buffers of older checkpoints."""


def spec(config: ConfigReader) -> ModelSpec:
    return bert_like(config, first_position=0)


def bert_like(config: ConfigReader, *, first_position: int) -> ModelSpec:
    """Return the spec of an encoder with BERT's layers.

    first_position: row of the table of positions that belongs to the first token.
    """
    from worker.models.common import ACTIVATIONS, bidirectional_attention
    from worker.models.mlp import MlpSpec
    from worker.models.spec import InputSpec, LayerSpec, ModelSpec

    config.must_be("position_embedding_type", "absolute")
    config.must_be("is_decoder", False)
    config.get("tie_word_embeddings")  # of a head that predicts masked words
    config.must_be("add_cross_attention", False)
    hidden_size, num_rows = (
        config.integer("hidden_size"),
        config.integer("max_position_embeddings", least=first_position + 1),
    )
    kinds = layer_kinds(config, (FULL,), lambda layer: FULL)
    config.must_be("hidden_act", *ACTIVATIONS)
    mlp = MlpSpec(
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        activation=ACTIVATIONS[config.get("hidden_act") or "gelu"],
        bias=True,
        is_gated=False,
        up="intermediate.dense",
        down="output.dense",
    )
    attention = replace(bidirectional_attention(config, NoRope()), qkv_bias=True, output_bias=True)
    return ModelSpec(
        architecture=config.get("architectures")[0],
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position=num_rows - first_position,
        norm_eps=config.number("layer_norm_eps", 1e-12),
        layers=tuple(LayerSpec(mixer=attention, mlp=mlp) for _ in kinds),
        inputs=InputSpec(
            positions=num_rows,
            first_position=first_position,
            token_types=config.integer("type_vocab_size", 2),
        ),
        norms=_NORMS,
        has_last_norm=False,
        norm_type="layer",
        norm_bias=True,
        has_head=False,
        unused_tensors=_UNUSED,
        hugging_face_names=_NAMES,
    )


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the number of token types. A file of RoBERTa has only the positions that tokens use."""
    if shape := metadata.shapes.get("token_types.weight"):
        config["type_vocab_size"] = math.prod(shape[:-1])


FAMILY = Family(
    models={"BertModel": "BERT, MiniLM, BGE, E5, cross encoders of these"},
    model_types=("bert",),
    spec=spec,
    gguf=Gguf(name="bert", keys={NORM_EPS: "layer_norm_eps"}, finish=_finish),
    is_encoder=True,
)
