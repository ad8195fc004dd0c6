"""What a step must take at least: bytes that are read once, and operations of products.

Sizes in bytes, rates in bytes or operations a second, times in seconds.
"""

from collections.abc import Sequence

from worker.models.spec import ModelSpec, parameter_shapes


def weight_bytes(spec: ModelSpec, itemsize: int = 2) -> int:
    """All weights that a decode step reads: a tied embedding as the head, another one not."""
    total = 0
    for name, shape in parameter_shapes(spec).items():
        if name == "embedding.weight" and not spec.tied_embeddings:
            continue
        size = itemsize
        for each in shape:
            size *= each
        total += size
    return total


def kv_bytes_per_token(spec: ModelSpec, itemsize: int = 2) -> int:
    """K and V of all layers."""
    return 2 * spec.num_layers * spec.kv_size * itemsize


def decode_floor(spec: ModelSpec, contexts: Sequence[int], read_rate: float) -> float:
    """Seconds of a step that reads every weight and each sequence's K and V once."""
    read = weight_bytes(spec) + sum(contexts) * kv_bytes_per_token(spec)
    return read / read_rate


def prefill_operations(spec: ModelSpec, prompts: Sequence[int]) -> float:
    """Of products and causal attention; the head is for the last token of each prompt."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layer = hidden * (2 * spec.query_size + 2 * spec.kv_size + 3 * inner)
    products = 2 * layer * spec.num_layers * sum(prompts)
    # Half of 4 T² h: a query sees what is before it.
    attention = 2 * spec.num_layers * spec.query_size * sum(each * each for each in prompts)
    return float(products + attention + 2 * spec.vocab_size * hidden * len(prompts))
