"""The KV fingerprint covers all facts that change the values of KV blocks."""

from typing import Any

import pytest
import torch

from proto.lifecycle import KVCacheGeometry, KVGroup
from worker.kv_cache import kv_cache_geometry, kv_layout
from worker.loaded_model import kv_fingerprint

GEOMETRY = KVCacheGeometry(30, 3, 64, "bfloat16", 23040, (KVGroup(),))
FACTS: dict[str, Any] = {
    "weights_sha256": "ab",
    "model_config": {"a": 1, "b": 2},
    "geometry": GEOMETRY,
    "block_size": 16,
    "compute_dtype": "torch.bfloat16",
    "weight_format": "packed",
}


@pytest.mark.parametrize(
    ("fact", "other"),
    [
        ("weights_sha256", "cd"),
        ("model_config", {"a": 1, "b": 3}),
        ("geometry", KVCacheGeometry(30, 3, 64, "float32", 23040, (KVGroup(),))),
        ("geometry", KVCacheGeometry(30, 3, 64, "bfloat16", 23040, (KVGroup(512),))),
        ("block_size", 32),
        ("compute_dtype", "torch.float32"),
        ("weight_format", "bf16"),
        ("weight_format", "packed+rotated"),
        ("rank_of", (0, 2)),
    ],
)
def test_the_fingerprint_depends_on_every_fact(fact: str, other: Any) -> None:
    assert kv_fingerprint(**FACTS | {fact: other}) != kv_fingerprint(**FACTS)


def test_the_fingerprint_ignores_the_order_of_facts() -> None:
    config = {"b": 2, "a": 1}
    assert kv_fingerprint(**FACTS | {"model_config": config}) == kv_fingerprint(**FACTS)
    assert len(kv_fingerprint(**FACTS)) == 32


def test_every_cache_dtype_has_its_own_fingerprint() -> None:
    layout = kv_layout([None, 8])
    fingerprints = {
        kv_fingerprint("00", {}, kv_cache_geometry(layout, 2, 16, dtype), 16, activations, "f32")
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
        for activations in ("torch.float32", "torch.bfloat16")
    }
    assert len(fingerprints) == 8
    assert {len(each) for each in fingerprints} == {32}
