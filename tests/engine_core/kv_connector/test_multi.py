"""MultiConnector: queries, the child that loads, and the release of blocks."""

import os
from typing import Any

import pytest

from engine_core.kv_connector import multi
from engine_core.kv_connector.base import (
    NO_MATCH,
    NOT_KNOWN_YET,
    DevicePrefix,
    Match,
    SchedulerConnector,
)
from engine_core.kv_connector.multi import MultiScheduler
from proto.errors import ConfigError
from proto.messages.kv_connector import KVConnectorOutput, MultiReport, MultiStep, pack, unpack
from proto.runtime.sockets import EventFd
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.engine_core.kv_connector.test_connector_registry import context
from tests.fakes.kv_requests import Setup, make_manager


class Child(SchedulerConnector):
    """Child connector that returns what the test sets and records its calls."""

    def __init__(self) -> None:
        self.match = NO_MATCH
        self.told: list[Any] = []
        self.outputs: list[KVConnectorOutput] = []
        self.delays = self.wants = False
        self.meta = b""
        self.event_fd = EventFd()
        self.attended = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.told.append(("asked", num_computed_tokens))
        return self.match

    def match_with_states(self, request, num_computed_tokens, on_device):
        self.told.append(("asked", num_computed_tokens, on_device))
        return self.match

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.told.append((block_ids, num_external_tokens))

    def build_connector_meta(self, output):
        return self.meta

    def needs_step(self):
        return self.wants

    def update_connector_output(self, output):
        self.outputs.append(output)

    def request_finished(self, request, block_ids):
        return self.delays, {"child": id(self)} if self.delays else None

    def fileno(self):
        return self.event_fd.descriptor

    def process_notifications(self):
        self.event_fd.clear()
        self.attended += 1

    def close(self):
        self.event_fd.close()


@pytest.fixture
def parts(monkeypatch):
    """Return the connector, its two children, and a KV cache of ten blocks."""
    monkeypatch.setattr(multi, "create_scheduler_connector", lambda config, context: Child())
    setup = Setup(make_manager(10, 4))
    document = {"kv_connector": "SharedStorageConnector"}
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [document] * 2}
    )
    values = {**context().__dict__, "transfer_refs": setup.manager.transfer_refs, "num_ranks": 2}
    connector = MultiScheduler(config, type(context())(**values))
    yield connector, connector.children, setup
    connector.close()


def test_all_children_are_queried_and_the_first_with_a_hit_loads(parts) -> None:
    """KVH-08."""
    connector, (first, second), setup = parts
    request = setup.requests.make("abcd efgh ijkl")
    second.match = Match(8, is_async=True)
    assert connector.get_num_new_matched_tokens(request, 4) == Match(8, is_async=True)
    assert first.told == second.told == [("asked", 4)]
    connector.update_state_after_alloc(request, [[1, 2, 3]], 8)
    assert first.told[1:] == [([[]], 0)]
    assert second.told[1:] == [([[1, 2, 3]], 8)]
    first.match = Match(4, is_async=False)
    assert connector.get_num_new_matched_tokens(request, 0) == first.match


def test_children_are_asked_for_states_which_all_of_them_must_support(parts) -> None:
    connector, (first, second), setup = parts
    assert not connector.supports_states
    request = setup.requests.make("abcd efgh ijkl")
    second.match = Match(8, is_async=True)
    on_device = DevicePrefix(8, frozenset({12}))
    assert connector.match_with_states(request, 4, on_device) == second.match
    assert first.told == second.told == [("asked", 4, on_device)]
    connector.update_state_after_alloc(request, [[1, 2, 3], [0, 0, 1]], 8)
    assert first.told[1:] == [([[], []], 0)]
    assert second.told[1:] == [([[1, 2, 3], [0, 0, 1]], 8)]


def test_an_undecided_child_makes_the_request_wait(parts) -> None:
    connector, (first, second), setup = parts
    first.match, second.match = Match(8, is_async=False), NOT_KNOWN_YET
    request = setup.requests.make("abcd efgh")
    assert connector.get_num_new_matched_tokens(request, 0) is NOT_KNOWN_YET


def test_every_child_gets_its_own_metadata(parts) -> None:
    connector, (first, second), _ = parts
    assert connector.build_connector_meta(None) == b""
    second.meta = b"two"
    assert unpack(connector.build_connector_meta(None), MultiStep).parts == [b"", b"two"]
    report = pack(MultiReport([b"one", b""], [[], []]))
    connector.update_connector_output(KVConnectorOutput([], [5], [6], report))
    assert first.outputs == [KVConnectorOutput([], [5], [6], b"one")]
    assert second.outputs == [KVConnectorOutput([], [5], [6], b"")]


def test_blocks_stay_until_every_delaying_child_has_sent_them(parts) -> None:
    connector, (first, second), setup = parts
    first.delays = second.delays = True
    request = setup.requests.make("abcd efgh")
    setup.requests.schedule(request)
    table = setup.requests.table(request)
    delays, params = connector.request_finished(request, [table])
    setup.manager.free(request)
    assert not delays
    assert params == {"child": id(second)}
    for sending in ([[0], []], [[], [0]], [[], [0]]):
        assert setup.manager.num_available_blocks == 9 - len(table)
        connector.update_connector_output(
            KVConnectorOutput(worker_metadata=pack(MultiReport([b"", b""], sending)))
        )
    assert setup.manager.transfer_refs.num_blocks == len(table)
    connector.update_connector_output(
        KVConnectorOutput(worker_metadata=pack(MultiReport([b"", b""], [[0], []])))
    )
    assert setup.manager.num_available_blocks == 9
    assert [each.finished_sending for each in first.outputs] == [[], [], [], [0]]


def test_a_thread_of_any_child_wakes_the_engine(parts) -> None:
    connector, (first, second), _ = parts
    assert os.fstat(connector.fileno())
    second.event_fd.notify()
    connector.process_notifications()
    assert (first.attended, second.attended) == (0, 1)
    second.wants = True
    assert connector.needs_step()


def test_it_needs_a_list_of_configurations() -> None:
    for extra in ({}, {"connectors": []}, {"connectors": [{}]}, {"connectors": 7, "more": 1}):
        config = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config=extra)
        with pytest.raises(ConfigError, match="needs"):
            MultiScheduler(config, context())
