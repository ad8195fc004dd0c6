"""Tiny random models, stored as llama.cpp would and run by transformers."""

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.fakes.gguf_files import numbers, permute_heads, random_rows
from tests.fakes.tiny_checkpoints import architecture_of
from worker.models.parts import StackPart, WeightSpec
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
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    state = model.state_dict()
    spec = spec_from_config(config_of(config))
    places: dict[str, list[tuple[WeightSpec, torch.Tensor]]] = {}
    for weight in spec.weights().values():
        if (place := place_in(state, weight)) is not None:
            name = weight.gguf if weight.gguf_stack is None else weight.gguf_stack.tensor
            places.setdefault(name, []).append((weight, place))
    tensors: Tensors = {}
    for seed, (name, parts) in enumerate(places.items()):
        (first, place), stack = parts[0], parts[0][0].gguf_stack
        shape = place.shape if stack is None else stack.shape
        own = next((each for part, each in kinds.items() if part in first.hugging_face), kind)
        stored_as = "F32" if place.dim() == 1 else own
        rows = random_rows(stored_as, math.prod(shape[:-1]), shape[-1], seed=seed)
        is_norm = "norm" in first.hugging_face
        values = numbers(stored_as, rows).reshape(shape) + (1.0 if is_norm else 0.0)
        for weight, place in parts:
            part = (
                values if weight.gguf_stack is None else rows_of(values, weight.gguf_stack, weight)
            )
            place.copy_(torch.from_numpy(part) - (1.0 if is_norm and spec.norms_add_one else 0.0))
        data: npt.NDArray[np.generic] = values if place.dim() == 1 else rows
        rope_interleaved_in = () if first.head_rows is None else first.head_rows.rope_interleaved_in
        if permuted and rope_interleaved_in == ("gguf",):
            is_query = ".q." in first.name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            data = permute_heads(data, heads)
        if stack is not None and len(shape) == 3:
            data = data.reshape(*shape[:2], -1)
        tensors[name] = (stored_as, data)
    return model, tensors


def rows_of(tensor: Any, stack: StackPart, weight: WeightSpec) -> Any:
    """Return the rows of a weight in a tensor of several."""
    of_one = tensor[stack.index] if len(stack.shape) > len(weight.shape) else tensor
    rows = of_one.T if stack.transposed else of_one
    part = rows[stack.first_row :: stack.row_step][: weight.shape[0]]
    return part if part.ndim == 1 else part[:, stack.first_column :][:, : weight.shape[1]]


_RENAMED = {
    ".block_sparse_moe.gate": ".mlp.gate",
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer": "router",
}
"""Parts of names in checkpoints, and what transformers calls them in memory."""


def place_in(state: Mapping[str, torch.Tensor], weight: WeightSpec) -> torch.Tensor | None:
    """Return the memory of a weight in a model of transformers, which stacks experts itself."""

    def renamed(name: str) -> str:
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours)
        return name

    stack = weight.hugging_face_stack
    if stack is not None and (whole := state.get(renamed(stack.tensor))) is not None:
        return rows_of(whole, stack, weight)
    return state.get(weight.hugging_face, state.get(renamed(weight.hugging_face)))


def config_of(config: PretrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values | {"architectures": [architecture_of(config)]}
