"""Tiny random models, stored as llama.cpp would and run by transformers."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PretrainedConfig

from tests.fakes.gguf_files import numbers, permute_heads, random_rows
from worker.models.registry import spec_from_config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
Tensors = dict[str, tuple[str, npt.NDArray[np.generic]]]
NO_KINDS: Mapping[str, str] = MappingProxyType({})


def tiny(
    kind: str, config: PretrainedConfig, permuted: bool, kinds: Mapping[str, str] = NO_KINDS
) -> tuple[Any, Tensors]:
    """Return a transformers model, and the tensors of the GGUF file that llama.cpp makes of it.

    kind: GGUF type of the matrices. kinds: other types, by a part of the name in transformers.
    """
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors: Tensors = {}
    state = model.state_dict()
    is_gemma = isinstance(config, Gemma3TextConfig)
    weights = spec_from_config(config_of(config)).weights().values()
    gguf_names = {weight.hugging_face: weight.gguf for weight in weights}
    for seed, (name, weight) in enumerate(state.items()):
        if name not in gguf_names:
            continue
        own = next((each for part, each in kinds.items() if part in name), kind)
        stored_as = "F32" if weight.dim() == 1 else own
        rows = random_rows(stored_as, *torch.atleast_2d(weight).shape, seed=seed)
        values = numbers(stored_as, rows).reshape(weight.shape)
        values += 1.0 if "norm" in name else 0.0
        weight.copy_(torch.from_numpy(values) - (1.0 if "norm" in name and is_gemma else 0.0))
        data: npt.NDArray[np.generic] = values if weight.dim() == 1 else rows
        if permuted and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = permute_heads(data, heads)
        tensors[gguf_names[name]] = (stored_as, data)
    return model, tensors


def config_of(config: PretrainedConfig) -> dict[str, Any]:
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    architecture = f"{name}ForCausalLM"
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values | {"architectures": [architecture]}
