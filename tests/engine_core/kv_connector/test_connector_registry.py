"""Lazy creation of connectors by name or module path, and its errors."""

import subprocess
import sys

import pytest

from engine_core.kv_connector.base import (
    CONNECTORS,
    NO_CONNECTOR,
    SchedulerContext,
    create_scheduler_connector,
)
from engine_core.worker_group import KVOutputAggregator
from proto.errors import ConfigError
from proto.messages.kv_connector import KVConnectorOutput
from proto.messages.lifecycle import KVCacheGeometry, KVGroup
from proto.settings.kv_transfer_config import NO_TRANSFER, KVTransferConfig
from tests.fakes.outside_connector import OutsideScheduler

OUTSIDE = KVTransferConfig(
    kv_connector="Outside", kv_connector_module_path="tests.fakes.outside_connector"
)


def context(*windows: int | None) -> SchedulerContext:
    groups = tuple(map(KVGroup, windows or (None,)))
    geometry = KVCacheGeometry(1, 1, 4, "float32", 32, groups)
    return SchedulerContext(
        geometry, 4, 10, b"f" * 32, 1, None, lambda seq_id: [[]], lambda request: None
    )


def test_nothing_configured_is_a_null_connector() -> None:
    assert create_scheduler_connector(NO_TRANSFER, context()) is NO_CONNECTOR


def test_a_third_party_connector_is_loaded_by_module_path() -> None:
    connector = create_scheduler_connector(OUTSIDE, context())
    assert isinstance(connector, OutsideScheduler)
    assert connector.config is OUTSIDE


def test_an_unknown_name_is_not_registered() -> None:
    with pytest.raises(ConfigError, match="UnknownConnector is not registered; there are Multi"):
        create_scheduler_connector(KVTransferConfig(kv_connector="UnknownConnector"), context())


@pytest.mark.parametrize(
    ("path", "named"),
    [("no.such.module", "cannot be imported"), ("tests.fakes", "tests.fakes has no ")],
)
def test_a_module_path_that_does_not_exist_is_refused(path: str, named: str) -> None:
    config = KVTransferConfig(kv_connector="Outside", kv_connector_module_path=path)
    with pytest.raises(ConfigError, match=named):
        create_scheduler_connector(config, context())


def test_supports_hma_a_hybrid_model_needs_a_connector_that_says_so() -> None:
    with pytest.raises(ConfigError, match=r"Outside does not support .* several KV cache groups"):
        create_scheduler_connector(OUTSIDE, context(None, 64))


def test_the_registry_imports_connectors_on_first_use() -> None:
    modules = [target.partition(":")[0] for target in CONNECTORS.values()]
    code = (
        "import sys, engine_core.kv_connector.base; "
        f"print([each for each in {modules!r} if each in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


class TestReportsOfAllRanks:
    def test_a_seq_id_is_finished_when_every_rank_has_reported_it(self) -> None:
        """KVH-01."""
        aggregator = KVOutputAggregator(2)
        assert aggregator.aggregate(KVConnectorOutput()).is_empty
        first = aggregator.aggregate(KVConnectorOutput([1], [2], [3, 4], b"one"))
        assert (first.finished_sending, first.finished_recving) == ([], [])
        assert (first.invalid_block_ids, first.worker_metadata) == ([3, 4], b"one")
        second = aggregator.aggregate(KVConnectorOutput([1], [], [4, 5]))
        assert (second.finished_sending, second.finished_recving) == ([1], [])
        assert aggregator.aggregate(KVConnectorOutput([], [2])).finished_recving == [2]

    def test_a_reused_seq_id_waits_for_every_rank_again(self) -> None:
        aggregator = KVOutputAggregator(2)
        for _ in range(2):
            assert aggregator.aggregate(KVConnectorOutput([7])).finished_sending == []
            assert aggregator.aggregate(KVConnectorOutput([7])).finished_sending == [7]

    def test_a_single_rank_finishes_a_seq_id_at_once(self) -> None:
        assert KVOutputAggregator(1).aggregate(KVConnectorOutput([7], [8])).finished_sending == [7]
