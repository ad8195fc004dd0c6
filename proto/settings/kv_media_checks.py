"""Checks of --kv-transfer-config against the other settings, made before any process starts.

The command line runs them through `config_checks`; without them a worker would fail late, or wrong
KV would be reused without any error.
"""

from collections.abc import Iterator
from typing import Any, Final

from proto.errors import ConfigError, shown
from proto.runtime.plugins import installed_names, target_of
from proto.settings.config import ServeConfig
from proto.settings.kv_media import check_private
from proto.settings.kv_peer import MULTI, PEER, peer_settings, read_key
from proto.settings.kv_transfer_config import (
    CPU_SPEC,
    DISK_SPEC,
    FIELD,
    REMOTE_SPEC,
    KVTransferConfig,
    child_configs,
    config_key_error,
    cpu_settings,
    disk_settings,
    kv_transfer_config,
    offload_settings,
    remote_address,
    remote_settings,
)

OFFLOADING: Final = "OffloadingConnector"
SHARED_STORAGE: Final = "SharedStorageConnector"
CONNECTORS: Final = (MULTI, OFFLOADING, PEER, SHARED_STORAGE)


def check_media(config: ServeConfig) -> None:
    """Raise ConfigError for an unknown connector, medium or key, and for a medium that cannot be
    used as configured. Connectors and media of other modules check themselves."""
    for part in _flatten(kv_transfer_config(config.cache.kv_transfer_config)):
        extra = part.kv_connector_extra_config
        if not part.kv_connector or part.kv_connector_module_path:
            continue
        if part.kv_connector not in CONNECTORS:
            if target_of("kv_connector", part.kv_connector):
                continue
            names = ", ".join([*CONNECTORS, *installed_names("kv_connector")])
            raise ConfigError(
                f"--kv-transfer-config: there is no kv_connector {shown(part.kv_connector)}; "
                f"there are {names}"
            )
        if part.kv_connector == SHARED_STORAGE:
            _check_weights(SHARED_STORAGE, config)
        elif part.kv_connector == PEER:
            settings = peer_settings(extra)
            read_key(settings)
            if part.stores:
                _check_below_step_timeout("lease_seconds", settings.lease_seconds, config)
            if part.loads:
                _check_below_step_timeout("load_timeout", settings.load_timeout, config)
            _check_weights(PEER, config)
        elif part.kv_connector == OFFLOADING and not extra.get("spec_module_path"):
            _check_medium(extra, config)


def require_copies_of_states(config: ServeConfig) -> None:
    """Raise ConfigError for a connector of tokend that does not copy recurrent states.

    The engine checks those of other modules, which it alone imports.
    """
    for part in _flatten(kv_transfer_config(config.cache.kv_transfer_config)):
        name = part.kv_connector
        if name in (PEER, SHARED_STORAGE) and not part.kv_connector_module_path:
            raise ConfigError(f"{FIELD}: {name} does not copy recurrent states", FIELD)


def disk_paths(config: ServeConfig) -> list[str]:
    """Return the folders of all disks that KV is stored on."""
    return [
        disk_settings(part.kv_connector_extra_config).disk_path
        for part in _flatten(kv_transfer_config(config.cache.kv_transfer_config))
        if part.kv_connector == OFFLOADING
        and part.stores
        and not part.kv_connector_module_path
        and not part.kv_connector_extra_config.get("spec_module_path")
        and part.kv_connector_extra_config.get("spec_name") == DISK_SPEC
    ]


def kv_outlives_process(config: ServeConfig) -> bool:
    """Return whether KV is stored where a later process or another host may find it.

    Connectors and media of other modules count as such a place.
    """
    parts = _flatten(kv_transfer_config(config.cache.kv_transfer_config))
    return any(
        part.kv_connector and not _is_host_memory(part)
        for part in parts
        if part.kv_connector != MULTI or part.kv_connector_module_path
    )


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
        if _is_host_memory(part):
            settings, _ = offload_settings(extra, config.cache.block_size, ())
            if settings.store_threshold >= 2:
                raise _swap("needs all blocks kept, and store_threshold keeps some of them")
            if not part.loads or not part.stores:
                raise _swap(f"needs a connector that stores and loads, not {part.kv_role}")
            return
    raise _swap(
        f"needs --kv-transfer-config with an {OFFLOADING} that has host memory (cpu_bytes_to_use)"
    )


def _is_host_memory(part: KVTransferConfig) -> bool:
    """Return whether a connector keeps KV in the memory of tokend's own processes."""
    extra = part.kv_connector_extra_config
    own = not part.kv_connector_module_path and not extra.get("spec_module_path")
    return own and part.kv_connector == OFFLOADING and extra.get("spec_name", CPU_SPEC) == CPU_SPEC


def _swap(what: str) -> ConfigError:
    return ConfigError(f"--preemption swap {what}")


def _flatten(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yield a connector and, recursively, the children of a MultiConnector."""
    yield config
    if config.kv_connector == MULTI and not config.kv_connector_module_path:
        for child in child_configs(config):
            yield from _flatten(child)


def _check_medium(extra: dict[str, Any], config: ServeConfig) -> None:
    """Check the settings of a medium of the OffloadingConnector."""
    spec = extra.get("spec_name", CPU_SPEC)
    if spec == CPU_SPEC:
        cpu_settings(extra)
    elif spec == DISK_SPEC:
        check_private(disk_settings(extra).disk_path)
    elif spec == REMOTE_SPEC:
        remote_address(remote_settings(extra))
    else:
        known = ", ".join((CPU_SPEC, DISK_SPEC, REMOTE_SPEC))
        raise config_key_error("spec_name", f"{shown(spec)} is not known; there are {known}")
    offload_settings(extra, config.cache.block_size, ())
    if spec != CPU_SPEC:
        _check_weights(spec, config)


def _check_below_step_timeout(key: str, seconds: float, config: ServeConfig) -> None:
    """Raise ConfigError for a wait after which healthy workers would count as hung."""
    limit = config.reliability.step_timeout
    if limit and seconds >= limit:
        raise config_key_error(
            key,
            f"must be less than --step-timeout ({limit:g}), got {seconds:g}: requests may wait so "
            "long for blocks, and the workers would be taken for hung",
        )


def _check_weights(medium: str, config: ServeConfig) -> None:
    """Raise ConfigError for two weight formats: KV then depends on the batch size of its step, but
    has the same fingerprint."""
    if config.model.cpu_weights == "packed+int8":
        raise ConfigError(
            f"--cpu-weights packed+int8 does not go with {medium}: the number of rows in a step "
            "selects one of two formats, whose KV differs; give auto, packed, int8, bf16 or f32"
        )
