"""The worker's start: what is wrong with the settings is said before anything is loaded."""

from unittest.mock import Mock

import pytest

from proto import PROTOCOL_VERSION
from proto.config import CacheConfig, ServeConfig
from proto.errors import ConfigError
from proto.lifecycle import ProcessBoot
from proto.prepared_model import PreparedModel
from worker import service


def boot(config: ServeConfig) -> ProcessBoot:
    model = PreparedModel(
        folder="/nowhere",
        name="none",
        source="/nowhere",
        architecture="LlamaForCausalLM",
        vocab_size=10,
        max_position=16,
        weights_sha256="0" * 64,
    )
    return ProcessBoot(
        protocol_version=PROTOCOL_VERSION,
        role="worker",
        index=0,
        incarnation=0,
        epoch=1,
        worker_epoch=1,
        run_dir="/nowhere",
        death_fd=-1,
        config=config,
        model=model,
    )


def test_a_kv_pool_beyond_the_memory_is_refused_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_model = Mock()
    monkeypatch.setattr(service, "load_model", load_model)
    config = ServeConfig(cache=CacheConfig(kv_cache_memory=1 << 60))
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        service.Service(boot(config), Mock(), Mock())
    load_model.assert_not_called()
