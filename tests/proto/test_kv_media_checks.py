"""Tiers that outlive the daemon never mix KV of different arithmetic, and say what is wrong."""

from typing import Any

import msgspec
import pytest

from proto.config import CacheConfig, DeviceConfig, ModelConfig, ServeConfig
from proto.config_checks import validate
from proto.errors import ConfigError

DISK = {"spec_name": "DiskOffloadingSpec", "disk_path": "/kv", "disk_bytes_to_use": 1 << 30}
REMOTE = {"spec_name": "RemoteOffloadingSpec", "remote_url": "redis://host"}
CPU = {"cpu_bytes_to_use": 1 << 30}


def offloading(extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def multi(*parts: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(parts)}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


def config(document: dict[str, Any], device: str = "auto", **model: Any) -> ServeConfig:
    return ServeConfig(
        model=ModelConfig(**model),
        cache=CacheConfig(kv_transfer_config=msgspec.json.encode(document).decode()),
        device=DeviceConfig(device=device),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "document",
    [offloading(DISK), offloading(REMOTE), multi(offloading(CPU), offloading(DISK))],
    ids=["disk", "remote", "part of several"],
)
def test_weights_of_several_forms_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--cpu-weights auto does not go with") as raised:
        validate(config(document))
    assert "give --cpu-weights bf16, packed, int8 or f32" in str(raised.value)
    assert raised.value.parameter == "cpu_weights"


@pytest.mark.parametrize("model", [{"cpu_weights": "bf16"}, {"dtype": "float32"}])
def test_weights_of_one_form_are_not(model: dict[str, str]) -> None:
    validate(config(offloading(DISK), **model))
    validate(config(multi(offloading(CPU), offloading(REMOTE)), **model))


def test_a_gpu_has_one_form() -> None:
    validate(config(offloading(DISK), device="cuda"))


def test_host_memory_ends_with_the_daemon() -> None:
    validate(config(offloading(CPU)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({**DISK, "disk_path": "kv"}, "disk_path .* must be an absolute path"),
        ({**REMOTE, "remote_url": "redis://:x@host"}, "remote_url .* must not have a password"),
        ({**REMOTE, "remote_url": "ftp://host"}, "remote_url .* must be redis://"),
    ],
)
def test_wrong_settings_are_found_before_anything_loads(
    extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config(multi(offloading(CPU), offloading(extra)), dtype="float32"))
