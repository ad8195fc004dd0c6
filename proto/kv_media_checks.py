"""Which settings are impossible together with media beyond the device.

Looks into --kv-transfer-config before anything loads: what would only be found by a worker, or
never, because nothing fails when KV of different arithmetic mixes.
"""

from collections.abc import Iterator
from typing import Any, Final

from proto.config import ServeConfig
from proto.errors import ConfigError
from proto.kv_media import (
    DISK_SPEC,
    REMOTE_SPEC,
    check_private,
    disk_settings,
    remote_address,
    remote_settings,
)
from proto.kv_transfer_config import KVTransferConfig, from_document, kv_transfer_config
from proto.offload_settings import CPU_SPEC, offload_settings

OFFLOADING: Final = "OffloadingConnector"
SHARED_STORAGE: Final = "SharedStorageConnector"
MULTI: Final = "MultiConnector"
CHILDREN: Final = "connectors"
"""Key of a MultiConnector's parts."""
_EXACT: Final = ("float32", "float16")
"""What activations are where one form of the weights computes every step."""


def check_media(config: ServeConfig) -> None:
    """Raise ConfigError naming the flag that is at fault."""
    for part in _parts(kv_transfer_config(config.cache.kv_transfer_config)):
        if part.kv_connector == SHARED_STORAGE and not part.kv_connector_module_path:
            _check_weights(SHARED_STORAGE, config)
            continue
        spec = part.kv_connector_extra_config.get("spec_name")
        if part.kv_connector != OFFLOADING or spec not in (DISK_SPEC, REMOTE_SPEC):
            continue
        if part.kv_connector_extra_config.get("spec_module_path"):
            continue
        _check_own(spec, part.kv_connector_extra_config)
        _check_weights(spec, config)


def check_preemption(config: ServeConfig) -> None:
    """Swapping needs memory of another kind, and a copy of all that could be preempted."""
    if config.scheduler.preemption != "swap":
        return
    if config.device.device != "cuda":
        raise _swap(
            "needs --device cuda: a CPU's KV is in host memory already, so a larger "
            "--kv-cache-memory does what swapping would, without copies"
        )
    for part in _parts(kv_transfer_config(config.cache.kv_transfer_config)):
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


def _parts(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """A connector, and those that it consists of."""
    yield config
    children = config.kv_connector_extra_config.get(CHILDREN)
    if config.kv_connector == MULTI and isinstance(children, list):
        for child in children:
            yield from _parts(from_document(child))


def _check_own(spec: str, extra: dict[str, Any]) -> None:
    if spec == DISK_SPEC:
        check_private(disk_settings(extra).disk_path)
    else:
        remote_address(remote_settings(extra))


def _check_weights(keeper: str, config: ServeConfig) -> None:
    """auto may multiply a few rows by one form of the weights and many by another.

    Then KV depends on what else was in the step, under one fingerprint.
    """
    if config.device.device == "cuda" or config.model.dtype in _EXACT:
        return
    if config.model.cpu_weights == "auto":
        raise ConfigError(
            f"--cpu-weights auto does not go with {keeper}: it may compute with several forms of "
            "the weights, whose KV is not the same, and what outlives the daemon would mix "
            "them; give --cpu-weights bf16, packed, int8 or f32 (on a GPU: --device cuda)",
            "cpu_weights",
        )
