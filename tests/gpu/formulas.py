"""Lower bounds of a step's duration: bytes that are read once, and operations of products.

Sizes in bytes, rates in bytes or operations a second, times in seconds.
"""

import math
from collections.abc import Sequence

from worker.models.attention import AttentionSpec
from worker.models.spec import ModelSpec


def weight_bytes(spec: ModelSpec, itemsize: int = 2) -> int:
    """Bytes of weights that a decode step reads, without an untied embedding."""
    total = 0
    for name, weight in spec.weights().items():
        if name == "embedding.weight" and not spec.tied_embeddings:
            continue
        total += itemsize * math.prod(weight.shape)
    return total


def kv_bytes_per_token(spec: ModelSpec, itemsize: int = 2) -> int:
    """Bytes of K and V, or of latents, of all layers per token."""
    shape = spec.attention_shape
    num_parts = 1 if shape.latent_dim else 2
    return num_parts * itemsize * len(spec.layers) * shape.num_kv_heads * shape.head_dim


def decode_floor(spec: ModelSpec, contexts: Sequence[int], read_rate: float) -> float:
    """Seconds of a decode step that reads all weights and the sequences' K and V once."""
    read = weight_bytes(spec) + sum(contexts) * kv_bytes_per_token(spec)
    return read / read_rate


def prefill_operations(spec: ModelSpec, prompts: Sequence[int]) -> float:
    """Operations of products and causal attention, with the head for the last tokens only."""
    products = sum(
        math.prod(weight.shape)
        for name, weight in spec.weights().items()
        if name.startswith("layers.") and len(weight.shape) == 2
    )
    # Half of 4 T² h: attention is causal.
    pairs = sum(prompt * prompt for prompt in prompts)
    attention = 0
    for layer in spec.attention_layers:
        assert isinstance(layer, AttentionSpec), "attention to latents has other operations"
        attention += 2 * pairs * layer.query_size
    head = 2 * spec.vocab_size * spec.hidden_size * len(prompts)
    return float(2 * products * sum(prompts) + attention + head)
