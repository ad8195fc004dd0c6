"""KV of different arithmetic has different block hashes."""

import torch

from worker.fingerprint import kv_fingerprint
from worker.kv_cache import kv_cache_geometry
from worker.kv_layout import kv_layout


def test_every_dtype_of_the_cache_has_a_fingerprint_of_its_own() -> None:
    layout = kv_layout([None, 8])
    fingerprints = {
        kv_fingerprint("00", {}, kv_cache_geometry(layout, 2, 16, dtype), 16, activations)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
        for activations in ("torch.float32", "torch.bfloat16")
    }
    assert len(fingerprints) == 8
    assert {len(each) for each in fingerprints} == {32}
