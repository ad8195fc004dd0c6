"""What processes are given at birth and say when they are ready, with what a test does not care
about filled in."""

from typing import Any

import msgspec

from proto import PROTOCOL_VERSION
from proto.config import ServeConfig
from proto.lifecycle import EngineReady, KVCacheGeometry, ProcessBoot, Role, WorkerReady
from proto.prepared_model import PreparedModel


def model(**changes: Any) -> PreparedModel:
    """A manifest of a model that is nowhere. changes: its fields."""
    fields: dict[str, Any] = {
        "folder": "/nowhere",
        "name": "fake",
        "source": "/nowhere",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 256,
        "max_position": 128,
        "weights_sha256": "0" * 64,
    }
    return PreparedModel(**(fields | changes))


def boot(role: Role, **changes: Any) -> ProcessBoot:
    """The first life of the first process of a role, for epoch 1. changes: its fields."""
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "index": 0,
        "incarnation": 0,
        "epoch": 1,
        "worker_epoch": 1,
        "run_dir": "/nowhere",
        "death_fd": -1,
        "config": ServeConfig(),
        "model": model(),
    }
    return ProcessBoot(role=role, **(fields | changes))


def worker_ready(**changes: Any) -> WorkerReady:
    """A worker of epoch 1 and rank 0, with room for 1,600 tokens. changes: its fields."""
    geometry = KVCacheGeometry(1, 1, 8, "float32", bytes_per_token=64)
    message = WorkerReady(PROTOCOL_VERSION, 1, 0, geometry, 1600 * 64, 1000, b"f" * 32, "fake")
    return msgspec.structs.replace(message, **changes)


def engine_ready(**changes: Any) -> EngineReady:
    """An engine of epoch 1 that takes 256 tokens a request. changes: its fields."""
    message = EngineReady(PROTOCOL_VERSION, 1, 256, 64, 16, 256, "fake")
    return msgspec.structs.replace(message, **changes)
