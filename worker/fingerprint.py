"""A digest over everything that changes the values in the KV cache.

It is the root of the block hashes, so KV of different arithmetic never mixes,
also where caches outlive a process.
"""

import hashlib
import json
from typing import Any, Final

from proto.lifecycle import KVCacheGeometry

LAYOUT_VERSION: Final = 4
"""Counts changes of the cache layout or of the arithmetic of a layer."""


def kv_fingerprint(
    weights_sha256: str,
    model_config: dict[str, Any],
    geometry: KVCacheGeometry,
    block_size: int,
    compute_dtype: str,
    weight_form: str,
    rank_of: tuple[int, int] = (0, 1),
) -> bytes:
    """32 bytes; equal in two processes only when their KV blocks are interchangeable.

    weight_form: its name, as worker/loader/format_choice.py gives it: other products, other KV.
    rank_of: this worker's rank, and how many share the model: other heads, other sums.
    """
    facts = [
        LAYOUT_VERSION,
        weights_sha256,
        model_config,
        geometry.num_slots,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.dtype,
        [group.sliding_window for group in geometry.groups],
        block_size,
        compute_dtype,
        weight_form,
        rank_of,
    ]
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()
