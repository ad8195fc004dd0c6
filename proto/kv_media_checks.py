"""Checks of --kv-transfer-config against the other settings, made before any process starts.

The command line runs them through `config_checks`; without them a worker would fail late, or wrong
KV would be reused without any error.
"""

from collections.abc import Iterator
from typing import Any, Final

from proto.config import ServeConfig
from proto.errors import ConfigError
from proto.kv_media import check_private
from proto.kv_transfer_config import (
    CHILDREN_KEY,
    CPU_SPEC,
    DISK_SPEC,
    REMOTE_SPEC,
    KVTransferConfig,
    disk_settings,
    from_document,
    kv_transfer_config,
    offload_settings,
    remote_address,
    remote_settings,
)

OFFLOADING: Final = "OffloadingConnector"
SHARED_STORAGE: Final = "SharedStorageConnector"
MULTI: Final = "MultiConnector"
_EXACT: Final = ("float32", "float16")
"""dtypes with which --cpu-weights auto computes every step with the same weight format."""


def check_media(config: ServeConfig) -> None:
    """Raise ConfigError if a disk, Redis server or shared folder cannot be used as configured."""
    for part in _flatten(kv_transfer_config(config.cache.kv_transfer_config)):
        if part.kv_connector == SHARED_STORAGE and not part.kv_connector_module_path:
            _check_weights(SHARED_STORAGE, config)
            continue
        spec = part.kv_connector_extra_config.get("spec_name")
        if part.kv_connector != OFFLOADING or spec not in (DISK_SPEC, REMOTE_SPEC):
            continue
        if part.kv_connector_extra_config.get("spec_module_path"):
            continue
        _check_medium(spec, part.kv_connector_extra_config)
        _check_weights(spec, config)


def check_preemption(config: ServeConfig) -> None:
    """Raise ConfigError if --preemption swap lacks a GPU or host memory to copy all KV to."""
    if config.scheduler.preemption != "swap":
        return
    if config.device.device != "cuda":
        raise _swap(
            "needs --device cuda: a CPU's KV is in host memory already, so a larger "
            "--kv-cache-memory does what swapping would, without copies"
        )
    for part in _flatten(kv_transfer_config(config.cache.kv_transfer_config)):
        extra = part.kv_connector_extra_config
        if part.kv_connector == OFFLOADING and extra.get("spec_name", CPU_SPEC) == CPU_SPEC:
            settings, _ = offload_settings(extra, config.cache.block_size, ())
            if settings.store_threshold >= 2:
                raise _swap("needs all blocks kept, and store_threshold keeps some of them")
            if not part.loads or not part.stores:
                raise _swap(f"needs a connector that stores and loads, not {part.kv_role}")
            return
    raise _swap(
        f"needs --kv-transfer-config with an {OFFLOADING} that has host memory (cpu_bytes_to_use)"
    )


def _swap(what: str) -> ConfigError:
    return ConfigError(f"--preemption swap {what}", "preemption")


def _flatten(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yield a connector and, recursively, the children of a MultiConnector."""
    yield config
    children = config.kv_connector_extra_config.get(CHILDREN_KEY)
    if config.kv_connector == MULTI and isinstance(children, list):
        for child in children:
            yield from _flatten(from_document(child))


def _check_medium(spec: str, extra: dict[str, Any]) -> None:
    if spec == DISK_SPEC:
        check_private(disk_settings(extra).disk_path)
    else:
        remote_address(remote_settings(extra))


def _check_weights(medium: str, config: ServeConfig) -> None:
    """Raise ConfigError if --cpu-weights auto may compute KV with several weight formats.

    Then KV depends on the batch size of its step, but has the same fingerprint.
    """
    if config.device.device == "cuda" or config.model.dtype in _EXACT:
        return
    if config.model.cpu_weights == "auto":
        raise ConfigError(
            f"--cpu-weights auto does not go with {medium}: it may compute with several forms of "
            "the weights, whose KV is not the same, and what outlives the daemon would mix "
            "them; give --cpu-weights bf16, packed, int8 or f32 (on a GPU: --device cuda)",
            "cpu_weights",
        )
