"""Tiny random encoders, as folders of transformers and of sentence-transformers."""

from pathlib import Path
from typing import Any

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
