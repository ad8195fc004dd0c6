"""--kv-transfer-config: vLLM's keys; an invalid document is refused with the reason."""

import pytest

from proto.errors import ConfigError
from proto.settings.config import CacheConfig, ServeConfig
from proto.settings.config_checks import validate
from proto.settings.kv_transfer_config import NO_TRANSFER, kv_transfer_config


def test_no_config_means_no_connector() -> None:
    assert kv_transfer_config(None) is NO_TRANSFER
    assert not NO_TRANSFER.kv_connector


def test_vllm_keys_are_parsed() -> None:
    config = kv_transfer_config(
        '{"kv_connector": "Mine", "kv_connector_module_path": "mine.kv", "kv_role": "kv_consumer",'
        ' "kv_connector_extra_config": {"a": [1]}, "kv_load_failure_policy": "fail"}'
    )
    assert (config.kv_connector, config.kv_connector_module_path) == ("Mine", "mine.kv")
    assert config.kv_connector_extra_config == {"a": [1]}
    assert config.kv_load_failure_policy == "fail"
    assert (config.loads, config.stores) == (True, False)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "takes JSON"),
        ("[]", "takes a JSON object"),
        ("{}", "needs kv_connector"),
        ('{"kv_connector": "X", "kv_port": 1, "kv_ip": ""}', "has no kv_ip, kv_port"),
        ('{"kv_connector": "X", "engine_id": "e"}', "has no engine_id"),
        ('{"kv_connector": "X", "kv_role": "both"}', "kv_role"),
        ('{"kv_connector": "X", "kv_load_failure_policy": "ignore"}', "kv_load_failure_policy"),
        ('{"kv_connector": 7}', "kv_connector"),
        ("[" * 100_000, "takes JSON"),
    ],
)
def test_invalid_configs_name_the_key(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        kv_transfer_config(text)
    assert error.value.param == "kv_transfer_config"


def test_it_needs_the_prefix_cache() -> None:
    cache = CacheConfig(kv_transfer_config='{"kv_connector": "X"}', enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="no-enable-prefix-caching"):
        validate(ServeConfig(cache=cache))
