"""Two media behind one MultiConnector: one does not store what the other is still loading."""

from typing import Any, cast

import pytest

from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import SchedulerConnector, SchedulerContext
from engine_core.kv_connector.multi import MultiScheduler
from engine_core.kv_connector.offload.connector import OffloadingScheduler
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Unblock
from engine_core.scheduler.kv_transfer import IsStorable
from engine_core.scheduler.scheduler import Scheduler
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    KVConnectorOutput,
    LoadFailurePolicy,
    MultiStep,
    OffloadMetadata,
    unpack,
)
from proto.messages.lifecycle import KVCacheGeometry, KVGroup
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import SchedulerConfig
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.fakes.engine_harness import VOCAB_SIZE, EngineHarness

BLOCK_SIZE = 4
SIZE = 12
PROMPT = list(range(37))


class TwoMedia(EngineHarness):
    """A scheduler with two media. parts: messages of each child to its workers, for every step."""

    def __init__(self, policy: LoadFailurePolicy = "recompute") -> None:
        super().__init__(block_size=BLOCK_SIZE)
        child: dict[str, Any] = {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, "block_size": SIZE},
        }
        config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_connector_extra_config={"connectors": [child, child]},
        )
        geometry = KVCacheGeometry(1, 1, 8, "float32", 64, (KVGroup(None),))
        self.parts: list[list[OffloadMetadata]] = []

        def connect(
            holds: TransferRefs, unblock: Unblock, is_storable: IsStorable
        ) -> SchedulerConnector:
            context = SchedulerContext(
                geometry,
                BLOCK_SIZE,
                1000,
                b"f" * 32,
                1,
                holds,
                self.kv_cache.block_ids,
                unblock,
                is_storable=is_storable,
            )
            self.multi = MultiScheduler(config, context)
            return self.multi

        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=8192),
            self.kv_cache,
            epoch=1,
            max_model_len=8192,
            vocab_size=VOCAB_SIZE,
            connect=connect,
            load_failure_policy=policy,
        )

    def child(self, index: int) -> OffloadingScheduler:
        return cast(OffloadingScheduler, self.multi.children[index])

    def send(self) -> SchedulerOutput:
        output = super().send()
        if output.connector_metadata != NO_PAYLOAD:
            step = unpack(output.connector_metadata, MultiStep)
            self.parts.append(
                [
                    unpack(each, OffloadMetadata) if each else OffloadMetadata()
                    for each in step.parts
                ]
            )
        return output

    def begin_loading(self) -> Request:
        """Start a request of which the first child loads a part."""
        request = self.add_one(PROMPT, 4)
        child = self.child(0)
        keys = child._layout.all_keys(request.block_hashes, len(PROMPT) // SIZE)
        child._manager.prepare_store(keys)
        child._manager.complete_store(keys)
        self.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert [len(each.loads) for each in self.parts[0]] == [1, 0]
        return request

    def assert_nothing_is_stored(self) -> None:
        for _ in range(3):
            self.step()
        assert not [job for parts in self.parts for each in parts for job in each.stores]


@pytest.fixture
def engine() -> TwoMedia:
    return TwoMedia()


def test_a_request_aborted_during_a_load_is_not_stored_on_the_other_medium(
    engine: TwoMedia,
) -> None:
    request = engine.begin_loading()
    engine.scheduler.abort_request(request.request_id)
    engine.assert_nothing_is_stored()


def test_a_request_that_fails_during_a_load_is_not_stored_on_the_other() -> None:
    engine = TwoMedia("fail")
    request = engine.begin_loading()
    ((load,), _) = (each.loads for each in engine.parts[0])
    engine.report(KVConnectorOutput(invalid_block_ids=load.device[0].block_ids[2:3]))
    assert request.status is RequestStatus.FINISHED_ERROR
    engine.assert_nothing_is_stored()


def test_a_restarted_request_waits_for_its_earlier_copies(engine: TwoMedia) -> None:
    request = engine.begin_loading()
    engine.scheduler.reset_prefix_cache(preempting=True)
    assert not engine.scheduler.kv_transfer.is_storable(request.seq_id)
    engine.step()
    engine.report(KVConnectorOutput(finished_recving=[request.seq_id]))
    assert engine.scheduler.kv_transfer.is_storable(request.seq_id)
