"""Settings of the PeerConnector: a wrong one is refused by its name before any process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from proto.errors import ConfigError
from proto.settings.config import CacheConfig, ModelConfig, ReliabilityConfig, ServeConfig
from proto.settings.kv_media_checks import (
    check_media,
    kv_outlives_process,
    require_copies_of_states,
)

KEY_FILE = __file__
"""Any file that is long enough."""


def serve(
    extra: dict[str, Any], *, role: str = "kv_both", step_timeout: float = 60.0, **model: Any
) -> ServeConfig:
    document = {
        "kv_connector": "PeerConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"key_file": KEY_FILE, **extra},
    }
    return ServeConfig(
        cache=CacheConfig(kv_transfer_config=json.dumps(document)),
        model=ModelConfig(**model),
        reliability=ReliabilityConfig(step_timeout=step_timeout),
    )


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"hosts": []}, "hosts is not known; there are transport, host"),
        ({"transport": "nccl"}, "transport"),
        ({"transport": "memory"}, "socket_folder is needed"),
        ({"transport": "memory", "socket_folder": "sockets"}, "an absolute path"),
        ({"host": "localhost"}, "host is no IP address"),
        ({"host": "0.0.0.0"}, "host 0.0.0.0 names no host"),
        ({"key_file": None}, "key_file is needed by tcp"),
        ({"peers": "10.0.0.1"}, "peers"),
        ({"port": 70_000}, "port must be between 0 and 65535"),
        ({"lease_seconds": 0}, "lease_seconds must be more than 0"),
        ({"load_timeout": 1e9}, "load_timeout must be more than 0"),
        ({"key_file": "/no/such/file"}, "key_file /no/such/file"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_media(serve(extra))


def test_a_key_allows_other_hosts() -> None:
    check_media(serve({"host": "10.0.0.1", "peers": ["10.0.0.2"]}))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_tcp_needs_a_key_in_every_role_and_memory_in_none(tmp_path: Path, role: str) -> None:
    with pytest.raises(ConfigError, match="key_file is needed by tcp"):
        check_media(serve({"key_file": None}, role=role))
    memory = {"transport": "memory", "socket_folder": str(tmp_path), "key_file": None}
    check_media(serve(memory, role=role))


@pytest.mark.parametrize(
    ("key", "role"), [("lease_seconds", "kv_producer"), ("load_timeout", "kv_consumer")]
)
def test_waits_are_shorter_than_a_step_may_be(key: str, role: str) -> None:
    """Else the workers would count as hung; a role that does not use a wait has no limit."""
    for seconds, step_timeout in ((60, 60.0), (30, 20.0)):
        with pytest.raises(ConfigError, match=f"{key} must be less than --step-timeout"):
            check_media(serve({key: seconds}, role=role, step_timeout=step_timeout))
    other = "kv_consumer" if role == "kv_producer" else "kv_producer"
    check_media(serve({key: 100}, role=other))
    check_media(serve({key: 59}, role=role))
    check_media(serve({key: 100}, role=role, step_timeout=0.0))


def test_kv_of_two_weight_formats_is_not_handed_over() -> None:
    with pytest.raises(ConfigError, match="packed\\+int8 does not go with PeerConnector"):
        check_media(serve({}, cpu_weights="packed+int8"))


def test_weights_are_hashed_because_another_process_gets_the_kv() -> None:
    assert kv_outlives_process(serve({}))


def test_recurrent_states_are_refused_before_a_weight_is_read() -> None:
    with pytest.raises(ConfigError, match="PeerConnector does not copy recurrent states"):
        require_copies_of_states(serve({}))
