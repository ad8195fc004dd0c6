"""Tiny random models that pool, as folders of sentence-transformers, and how they pool."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model

_MODULE = "sentence_transformers.models."


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer of words `w0 w1 …`, which ends each text with token 2.

    The second text of a pair has type 1.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"w{number}": number for number in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_modules(
    folder: Path, size: int, *kinds: str, dense: int = 0, normalize: bool = True
) -> None:
    """Save modules.json and what it names. dense: numbers of a Dense module's result; 0: none."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": size} | {f"pooling_mode_{kind}": True for kind in kinds}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if dense:
        modules.append(("Dense", "2_Dense"))
        (folder / "2_Dense").mkdir()
        dense_config = {
            "in_features": size * len(kinds),
            "out_features": dense,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        (folder / "2_Dense" / "config.json").write_text(json.dumps(dense_config))
        draw = torch.Generator().manual_seed(5)
        weights = {
            "linear.weight": torch.randn(dense, size * len(kinds), generator=draw),
            "linear.bias": torch.randn(dense, generator=draw),
        }
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    if normalize:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_MODULE}{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def save_causal(
    folder: Path, *, name: str = "qwen3", with_head: bool = False, head_dim: int | None = None
) -> torch.nn.Module:
    """Save a causal model; without its head tensors are named as in Qwen3-Embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name]
    if head_dim:
        config = type(config).from_dict(config.to_dict() | {"head_dim": head_dim})
    model = tiny_model(config)
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)
    if with_head:
        return model
    path = folder / "model.safetensors"
    body = {
        key.removeprefix("model."): tensor
        for key, tensor in load_file(path).items()
        if not key.startswith("lm_head.")
    }
    save_file(body, path)
    return model


@torch.inference_mode()
def hidden_states(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """Return what the body of a causal model of transformers gives for each token."""
    body = getattr(model, "model", model)
    hidden: torch.Tensor = body(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    return hidden


def pooled(hidden: torch.Tensor, kind: str) -> torch.Tensor:
    """Pool hidden states [T, H] by a pooling type's name in sentence-transformers."""
    weights = torch.arange(1.0, len(hidden) + 1)[:, None]
    return {
        "cls_token": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max_tokens": lambda: hidden.amax(0),
        "mean_tokens": lambda: hidden.mean(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean_tokens": lambda: (hidden * weights).sum(0) / weights.sum(),
    }[kind]()


def dense(folder: Path, vector: torch.Tensor) -> torch.Tensor:
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    return torch.tanh(F.linear(vector, weights["linear.weight"], weights["linear.bias"]))
