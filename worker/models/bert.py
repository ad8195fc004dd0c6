"""BERT (Devlin et al., 2018): absolute positions, token types, norms after residual sums."""

from typing import Final

from worker.models.common import FULL, layer_kinds
from worker.models.config_reader import ConfigReader
from worker.models.encoder import ACTIVATIONS, bidirectional_attention
from worker.models.mlp import MlpSpec
from worker.models.rope import NoRope
from worker.models.spec import InputSpec, LayerNorms, LayerSpec, ModelSpec

MODEL_TYPE = "bert"
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
    return bert_like(config, architecture="BertModel", first_position=0)


def bert_like(config: ConfigReader, *, architecture: str, first_position: int) -> ModelSpec:
    """Return the spec of an encoder with BERT's layers.

    first_position: row of the table of positions that belongs to the first token.
    """
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
    activation = ACTIVATIONS[config.get("hidden_act") or "gelu"]
    mlp = MlpSpec(
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        activation=activation,
        bias=True,
        is_gated=False,
        up="intermediate.dense",
        down="output.dense",
    )
    attention = bidirectional_attention(config, rope=NoRope(), qkv_bias=True, output_bias=True)
    result = ModelSpec(
        architecture=architecture,
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
        norm_kind="layer",
        norm_bias=True,
        has_head=False,
        unused_tensors=_UNUSED,
        hugging_face_names=_NAMES,
    )
    config.refuse_leftovers()
    return result
