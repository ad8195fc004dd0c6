"""Tiny random encoders: folders of transformers and of sentence-transformers, GGUF files."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma3TextConfig,
    ModernBertConfig,
    PretrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.fakes.tiny_pooling import save_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**_SIZES, max_position_embeddings=128),
    "roberta": RobertaConfig(**_SIZES, max_position_embeddings=130, type_vocab_size=1),
    "xlm-roberta": XLMRobertaConfig(
        **(_SIZES | {"pad_token_id": 1, "bos_token_id": 0}),
        max_position_embeddings=130,
        type_vocab_size=1,
    ),
    "modernbert": ModernBertConfig(
        **_SIZES,
        max_position_embeddings=128,
        local_attention=16,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "embedding gemma": Gemma3TextConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        query_pre_attn_scalar=16,
        sliding_window=16,
        use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


def _randomise(model: torch.nn.Module) -> None:
    """Draw every weight, norm and bias so that it affects the result."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            is_norm = "norm" in name.lower() and name.endswith("weight")
            if is_norm and "gemma" in type(model).__name__.lower():
                weight.copy_(0.3 * noise)  # it adds 1
            elif is_norm:
                weight.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)


def save_encoder(name: str, folder: Path, *, num_labels: int = 0, **changes: Any) -> Any:
    """Save a model and a tokenizer, and return the model.

    num_labels: of a head of scores; 0: none. changes: of its configuration.
    """
    kind = CONFIGS[name]
    config = kind.__class__.from_dict(kind.to_dict() | changes)
    config._attn_implementation = "eager"
    if num_labels:
        config.num_labels = num_labels
    auto = AutoModelForSequenceClassification if num_labels else AutoModel
    model = auto.from_config(config).eval()
    _randomise(model)
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return model


GGUF_ARCHITECTURES: Final = {
    "bert": gguf.MODEL_ARCH.BERT,
    "roberta": gguf.MODEL_ARCH.BERT,
    "xlm-roberta": gguf.MODEL_ARCH.BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "embedding gemma": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def write_encoder_gguf(
    name: str,
    model: Any,
    path: Path,
    kind: str = "F32",
    *,
    metadata: Mapping[str, Any] = _NOTHING,
    tensors: Mapping[str, np.ndarray] = _NOTHING,
) -> None:
    """Write a model as llama.cpp's converter does, with the names of the `gguf` package.

    kind: of matrices whose rows are whole blocks of it; the model then gets their numbers.
    metadata: further keys of the architecture, or other values. tensors: further ones.
    """
    architecture, config = GGUF_ARCHITECTURES[name], model.config
    prefix = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, prefix)
    first = config.pad_token_id + 1 if "roberta" in name else 0
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings - first,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.causal": False,
    }
    if name == "modernbert":
        keys["attention.layer_norm_epsilon"] = config.norm_eps
        keys["attention.sliding_window"] = config.local_attention
        keys["attention.sliding_window_pattern"] = 3
        keys["vocab_size"] = config.vocab_size
        keys["rope.scaling.type"] = "none"
    elif name == "embedding gemma":
        keys["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
        keys["attention.head_count_kv"] = config.num_key_value_heads
        keys["attention.key_length"] = keys["attention.value_length"] = config.head_dim
    else:
        keys["attention.layer_norm_epsilon"] = config.layer_norm_eps
    for key, value in (keys | metadata).items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(f"{prefix}.{key}", value)
    _add_vocabulary(name, writer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored_as = gguf.GGMLQuantizationType[kind]
    for own, weight in model.state_dict().items():
        full = f"model.{own}" if name == "embedding gemma" else own
        theirs = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if theirs is None or "pooler" in own:
            continue
        numbers = weight.float()
        if name == "embedding gemma" and "norm" in own:
            numbers = numbers + 1.0
        if theirs == "position_embd.weight":
            numbers = numbers[first:]
        data = numbers.numpy()
        if kind != "F32" and data.ndim == 2 and not data.shape[1] % 32 and "embd" not in theirs:
            blocks = gguf.quants.quantize(data, stored_as)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, stored_as)))
            writer.add_tensor(theirs, blocks, raw_dtype=stored_as)
        else:
            writer.add_tensor(theirs, data)
    for theirs, data in tensors.items():
        writer.add_tensor(theirs, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(name: str, writer: gguf.GGUFWriter, size: int) -> None:
    """Add a vocabulary of `size` words without any order."""
    model, special = {
        "bert": ("bert", ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]),
        "xlm-roberta": ("t5", ["<s>", "<pad>", "</s>", "<unk>"]),
        "embedding gemma": ("llama", ["<pad>", "<eos>", "<bos>", "<unk>"]),
    }.get(name, ("gpt2", ["<pad>", "<s>", "</s>", "<unk>"]))
    tokens = [*special, "a", "b", "ab", *(f"w{number}" for number in range(7, size))]
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (size - len(special)))
    writer.add_token_scores([-float(number) for number in range(size)])
    writer.add_token_merges(["a b"])
    for key, token in (("unknown", "unk"), ("bos", "bos"), ("eos", "eos")):
        found = next((place for place, each in enumerate(special) if token in each.lower()), None)
        if found is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", found)
