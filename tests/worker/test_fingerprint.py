"""The KV fingerprint covers all facts that change the values of KV blocks."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proto.messages.lifecycle import KVCacheGeometry, KVGroup
from proto.settings.config import CacheConfig, DeviceConfig, ModelConfig, ServeConfig
from tests.fakes.edits import edit_middle
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from worker.attention.kv_cache import kv_cache_geometry, kv_layout
from worker.create_device import create_device
from worker.loaded_model import kv_fingerprint, load
from worker.parallel.group import RankGroup

GEOMETRY = KVCacheGeometry(30, 3, 64, "bfloat16", 23040, (KVGroup(),))
FACTS: dict[str, Any] = {
    "weights_hash": "ab",
    "model_config": {"a": 1, "b": 2},
    "geometry": GEOMETRY,
    "state_layout": (640, 512, "torch.float32"),
    "block_size": 16,
    "compute_dtype": "torch.bfloat16",
    "weight_format": "packed",
    "rank_of": (0, 1, False),
    "kernels": (),
    "implementation": "",
    "ropes": (),
}


@pytest.mark.parametrize(
    ("fact", "other"),
    [
        ("weights_hash", "cd"),
        ("model_config", {"a": 1, "b": 3}),
        ("geometry", KVCacheGeometry(30, 3, 64, "float32", 23040, (KVGroup(),))),
        ("geometry", KVCacheGeometry(30, 3, 64, "bfloat16", 23040, (KVGroup(512),))),
        ("state_layout", (640, 640, "torch.float32")),
        ("state_layout", (640, 512, "torch.float16")),
        ("state_layout", ()),
        ("block_size", 32),
        ("compute_dtype", "torch.float32"),
        ("weight_format", "bf16"),
        ("weight_format", "packed+int8"),
        ("rank_of", (0, 2, False)),
        ("rank_of", (0, 1, True)),
        ("kernels", ("avx2",)),
        ("ropes", ("LongRoPE",)),
        ("kernels", ("avx2", "bf16 64x64 avx2")),
        ("implementation", "transformers 5.23.0"),
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
        kv_fingerprint(
            **FACTS
            | {
                "geometry": kv_cache_geometry(layout, 2, 16, dtype),
                "compute_dtype": activations,
            }
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
        for activations in ("torch.float32", "torch.bfloat16")
    }
    assert len(fingerprints) == 8
    assert {len(each) for each in fingerprints} == {32}


@pytest.mark.parametrize("outlives", [False, True])
def test_kv_that_outlives_the_process_is_not_found_after_an_edit(
    tmp_path: Path, outlives: bool
) -> None:
    """Of a model whose weights were edited in place, with size and times restored.

    KV in memory ends with the process; its fingerprint has the sample of the manifest.
    """
    save_tiny("llama", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    connector = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": "/kv"},
    }
    text = msgspec.json.encode(connector).decode() if outlives else None
    config = ServeConfig(
        model=ModelConfig(cpu_weights="f32"),
        cache=CacheConfig(kv_transfer_config=text),
        device=DeviceConfig(device="cpu", cpu_threads=1),
    )
    device = create_device(config, 0)

    def fingerprint() -> bytes:
        loaded = load(config, prepared, device, RankGroup(), lambda message: None)
        return loaded.fingerprint(block_size=16)

    before = fingerprint()
    assert fingerprint() == before
    edit_middle(next(tmp_path.glob("*.safetensors")))
    assert (fingerprint() != before) is outlives
