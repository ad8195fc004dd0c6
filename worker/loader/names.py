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
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_TABLES: Final = {
    "safetensors": (_HUGGING_FACE, "model.layers"),
    "gguf": (_GGUF, "blk"),
}

ROPE_FACTORS: Final = "rope_freqs.weight"
"""In a GGUF file: divisors of the rotary frequencies, float32 [head_dim / 2]."""


def name_in_file(format: str, name: str) -> str:
    """The name that a file of this format gives to tokend's `name`."""
    table, layers = _TABLES[format]
    *layer, part, kind = name.split(".")
    if layer:
        return f"{layers}.{layer[1]}.{table[part]}.{kind}"
    return f"{table[part]}.{kind}"


def carries_no_weight(format: str, name: str) -> bool:
    """Whether a tensor only repeats what the configuration says.

    Old Llama checkpoints store the rotary frequencies of every layer.
    """
    return format == "safetensors" and name.endswith(".rotary_emb.inv_freq")
