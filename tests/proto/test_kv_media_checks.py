"""KV tiers that outlive the daemon: settings that could mix KV of several numerics are refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from proto.errors import ConfigError
from proto.settings.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServeConfig,
)
from proto.settings.config_checks import validate
from proto.settings.kv_media_checks import check_media, kv_outlives_process

DISK = {"spec_name": "DiskOffloadingSpec", "disk_path": "/kv", "disk_bytes_to_use": 1 << 30}
REMOTE = {"spec_name": "RemoteOffloadingSpec", "remote_url": "redis://host"}
SHARED = {
    "kv_connector": "SharedStorageConnector",
    "kv_connector_extra_config": {"shared_storage_path": "/kv"},
}
CPU = {"cpu_bytes_to_use": 1 << 30}


def offloading(extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def multi(*parts: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(parts)}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


def swapping(document: dict[str, Any] | None, device: str = "cuda") -> ServeConfig:
    text = None if document is None else msgspec.json.encode(document).decode()
    return ServeConfig(
        scheduler=SchedulerConfig(preemption="swap"),
        cache=CacheConfig(kv_transfer_config=text),
        device=DeviceConfig(device=device),  # type: ignore[arg-type]
    )


def config(document: dict[str, Any], device: str = "auto", **model: Any) -> ServeConfig:
    return ServeConfig(
        model=ModelConfig(**model),
        cache=CacheConfig(kv_transfer_config=msgspec.json.encode(document).decode()),
        device=DeviceConfig(device=device),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "document",
    [
        offloading(DISK),
        offloading(REMOTE),
        SHARED,
        multi(offloading(CPU), offloading(DISK)),
        multi(offloading(CPU), SHARED),
    ],
    ids=["disk", "remote", "folder", "disk of several", "folder of several"],
)
def test_several_weight_formats_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--cpu-weights packed\+int8 does not go with") as raised:
        validate(config(document, cpu_weights="packed+int8"))
    assert "give auto, packed, int8, bf16 or f32" in str(raised.value)
    assert raised.value.param == "cpu_weights"


@pytest.mark.parametrize("model", [{}, {"cpu_weights": "bf16"}, {"dtype": "float32"}])
def test_one_weight_format_is_accepted(model: dict[str, str]) -> None:
    validate(config(offloading(DISK), **model))
    validate(config(multi(offloading(CPU), offloading(REMOTE)), **model))
    validate(config(multi(SHARED, offloading(CPU)), **model))


def test_a_gpu_has_one_weight_format() -> None:
    validate(config(offloading(DISK), device="cuda"))
    validate(config(SHARED, device="cuda"))


def test_host_memory_accepts_several_weight_formats() -> None:
    validate(config(offloading(CPU), cpu_weights="packed+int8"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({**DISK, "disk_path": "kv"}, "disk_path must be an absolute path"),
        ({**REMOTE, "remote_url": "redis://:x@host"}, "remote_url must not have a password"),
        ({**REMOTE, "remote_url": "ftp://host"}, "remote_url must be redis://"),
    ],
)
def test_connector_settings_are_checked_without_loading_a_model(
    extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config(multi(offloading(CPU), offloading(extra)), dtype="float32"))


def test_swap_with_a_host_memory_tier_is_accepted() -> None:
    validate(swapping(offloading(CPU)))
    validate(swapping(multi(offloading(DISK), offloading(CPU))))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_swap_on_a_cpu_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="a CPU's KV is in host memory already") as raised:
        validate(swapping(offloading(CPU), device))
    assert raised.value.param == "preemption"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "needs --kv-transfer-config with an OffloadingConnector"),
        (offloading(DISK), "needs --kv-transfer-config with an OffloadingConnector"),
        (offloading({**CPU, "store_threshold": 2}), "store_threshold keeps some of them"),
        (offloading({**CPU, "store_threshold": "2"}), "store_threshold is wrong: Expected `int`"),
        ({**offloading(CPU), "kv_role": "kv_producer"}, "stores and loads, not kv_producer"),
    ],
)
def test_swap_is_refused_if_the_tier_could_lose_blocks(
    document: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(swapping(document))


def test_a_disk_folder_writable_by_other_users_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    document = offloading({**DISK, "disk_path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"disk_path .* may be written to by others") as raised:
        validate(config(document, dtype="float32"))
    assert raised.value.param == "kv_transfer_config"
    tmp_path.chmod(0o700)
    validate(config(document, dtype="float32"))


@pytest.mark.parametrize(
    ("connector", "expected"),
    [
        ({"kv_connector": "LMCacheConnector"}, "there is no kv_connector LMCacheConnector"),
        (
            offloading({"spec_name": "TapeOffloadingSpec"}),
            "spec_name TapeOffloadingSpec is not known",
        ),
        (offloading({"cpu_bytes": 1}), "cpu_bytes is not known"),
        (offloading({}), "cpu_bytes_to_use is needed"),
        (
            offloading({"cpu_bytes_to_use": 1 << 20, "block_size": 3}),
            "block_size must be a multiple",
        ),
        (multi({"kv_connector": "X"}), "there is no kv_connector X"),
        ({"kv_connector": "MultiConnector"}, "MultiConnector needs connectors"),
    ],
)
def test_unknown_connectors_and_keys_are_refused_before_any_process_starts(
    connector: dict[str, Any], expected: str
) -> None:
    config = ServeConfig(
        cache=CacheConfig(kv_transfer_config=msgspec.json.encode(connector).decode())
    )
    with pytest.raises(ConfigError, match=expected):
        check_media(config)


@pytest.mark.parametrize(
    ("connector", "expected"),
    [
        (offloading(CPU), False),
        (multi(offloading(CPU)), False),
        (offloading(DISK), True),
        (offloading(REMOTE), True),
        (SHARED, True),
        (multi(offloading(CPU), SHARED), True),
        ({"kv_connector": "Mine", "kv_connector_module_path": "mine"}, True),
        (offloading(CPU | {"spec_module_path": "mine"}), True),
    ],
)
def test_kv_outlives_the_process_except_in_host_memory(
    connector: dict[str, Any], expected: bool
) -> None:
    assert kv_outlives_process(config(connector)) is expected


def test_without_a_connector_no_kv_outlives_the_process() -> None:
    assert not kv_outlives_process(ServeConfig())


def test_settings_of_external_connectors_are_not_checked() -> None:
    for connector in (
        {"kv_connector": "Mine", "kv_connector_module_path": "mine"},
        offloading({"spec_name": "Mine", "spec_module_path": "mine", "anything": 1}),
    ):
        check_media(
            ServeConfig(
                cache=CacheConfig(kv_transfer_config=msgspec.json.encode(connector).decode())
            )
        )
