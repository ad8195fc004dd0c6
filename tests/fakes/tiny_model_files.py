"""Small model files: a GGUF file, a Hugging Face folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from gguf import GGUFWriter

TOKENS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ġa", "<|end|>"]
"""A byte-level vocabulary: characters, the space, one merge, one special token."""
END = TOKENS.index("<|end|>")
SIZES = {"hidden": 32, "heads": 4, "kv_heads": 2, "layers": 1, "feed_forward": 48, "length": 64}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tensors(vocab_size: int = len(TOKENS)) -> dict[str, np.ndarray]:
    """Return weights by GGUF name, float32, in torch's order of dimensions."""
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (vocab_size, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (48, 32),
        "blk.0.ffn_up.weight": (48, 32),
        "blk.0.ffn_down.weight": (32, 48),
    }
    return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    *,
    extra: dict[str, Any] | None = None,
    tokenizer: bool = True,
    architecture: str = "llama",
    layers: int = SIZES["layers"],
    head_dim: int = 8,
    part_tensors: int = 0,
    tokens: Sequence[str] = TOKENS,
) -> dict[str, np.ndarray]:
    """Write a model of one layer; return its tensors.

    extra: more metadata, by key. layers, head_dim: values in the metadata. part_tensors: tensors in
    a file, after a first one without; 0 for a single file. tokens: the vocabulary.
    """
    from gguf import GGUFWriter

    is_split = part_tensors > 0
    writer = GGUFWriter(
        path, architecture, split_max_tensors=part_tensors, small_first_shard=is_split
    )
    writer.add_name("tiny")
    writer.add_context_length(SIZES["length"])
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(SIZES["feed_forward"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        (add | {bool: writer.add_bool})[type(value)](key, value)
    if tokenizer:
        add_tokenizer(writer, tokens)
        writer.add_chat_template(TEMPLATE)
    weights = tensors(len(tokens))
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def add_tokenizer(writer: "GGUFWriter", tokens: Sequence[str] = TOKENS) -> None:
    """Add a tokenizer to the metadata, in which all tokens behind the plain ones are special."""
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens))
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3] * (len(tokens) - len(TOKENS) + 1))
    writer.add_token_merges(["Ġ a"])
    writer.add_eos_token_id(END)


def write_folder(folder: Path, *, shards: int = 1, config: dict[str, Any] | None = None) -> None:
    """Write a Hugging Face folder of a llama model of one layer, in one or more shards."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "max_position_embeddings": SIZES["length"],
        "bos_token_id": 0,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(settings | (config or {})))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE})
    )
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    draw = np.random.default_rng(0)
    weights = {
        "model.embed_tokens.weight": draw.standard_normal((len(TOKENS), 32), np.float32),
        "model.norm.weight": np.ones(32, np.float16),
    }
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    weight_map = {}
    for number, (name, weight) in enumerate(weights.items()):
        file = f"model-{number}.safetensors"
        weight_map[name] = file
        save_file({name: weight}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def tokenizer_json() -> bytes:
    """Return a tokenizer over TOKENS, for the `tokenizers` library."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str().encode()
