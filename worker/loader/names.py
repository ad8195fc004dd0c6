"""The names of weights: tokend's own, Hugging Face's and GGUF's.

    tokend               Hugging Face                             GGUF
    layers.3.q.weight    model.layers.3.self_attn.q_proj.weight   blk.3.attn_q.weight

Knows no shapes and no files.
"""

from typing import Final

_HUGGING_FACE: Final = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_WITH_POST_NORMS: Final = _HUGGING_FACE | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Where both blocks have a norm after them, the one before the MLP is called differently."""
_GGUF: Final = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
ROPE_FACTORS: Final = "rope_freqs.weight"
"""In a GGUF file: divisors of the rotary frequencies, float32 [head_dim / 2]."""


def name_in_file(format: str, name: str, post_norms: bool = False) -> str:
    """The name that a file of this format gives to tokend's `name`.

    post_norms: the model has norms after attention and MLP.
    """
    if format == "gguf":
        table, layers = _GGUF, "blk"
    else:
        table, layers = _WITH_POST_NORMS if post_norms else _HUGGING_FACE, "model.layers"
    *layer, part, kind = name.split(".")
    if layer:
        return f"{layers}.{layer[1]}.{table[part]}.{kind}"
    return f"{table[part]}.{kind}"


def carries_no_weight(format: str, name: str) -> bool:
    """Whether a tensor only repeats what the configuration says.

    Old Llama checkpoints store the rotary frequencies of every layer.
    """
    return format == "safetensors" and name.endswith(".rotary_emb.inv_freq")
