"""Boot and ready messages of processes, with defaults for all fields."""

import json
from typing import Any

import msgspec

from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import EngineReady, KVCacheGeometry, ProcessBoot, Role, WorkerReady
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ServeConfig


def model(**changes: Any) -> PreparedModel:
    """The manifest of a model that does not exist on disk. changes: fields to replace."""
    fields: dict[str, Any] = {
        "folder": "/nowhere",
        "name": "fake",
        "source": "/nowhere",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 256,
        "max_position": 128,
        "weights_sample": "0" * 64,
    }
    return PreparedModel(**(fields | changes))


def boot(role: Role, **changes: Any) -> ProcessBoot:
    """The boot of the first incarnation of a role's first process. changes: fields to replace."""
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
    """A worker of epoch 1 and rank 0 with memory for 1,600 tokens. changes: fields to replace."""
    geometry = KVCacheGeometry(1, 1, 8, "float32", bytes_per_token=64)
    message = WorkerReady(PROTOCOL_VERSION, 1, 0, geometry, 1600 * 64, 1000, b"f" * 32, "fake")
    return msgspec.structs.replace(message, **changes)


def engine_ready(**changes: Any) -> EngineReady:
    """An engine of epoch 1 with a context of 256 tokens. changes: fields to replace."""
    message = EngineReady(PROTOCOL_VERSION, 1, 256, 64, 16, 256, "fake")
    return msgspec.structs.replace(message, **changes)


def profiler_config(folder: object, **changes: object) -> str:
    """Return a value of --profiler-config."""
    return json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder), **changes})
