"""Worker connectors around a step: the order of calls, and when results are reported."""

import os
import random
import time
from typing import Any

import pytest

from proto.messages.kv_connector import KVConnectorOutput, KVConnectorReport, MultiStep, pack
from proto.messages.scheduler_output import CachedRequestData, SchedulerOutput
from proto.runtime.sockets import Poller
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.fakes.devices import CPU
from tests.fakes.outside_connector import OutsideWorker
from worker.kv_connector import multi
from worker.kv_connector.base import (
    NO_CONNECTOR,
    FinishedTransfers,
    WorkerConnector,
    WorkerContext,
    create_worker_connector,
)
from worker.kv_connector.multi import MultiWorker
from worker.kv_connector.steps import ConnectorSteps, StepConnector
from worker.layers.layer_progress import HostProgress

CONTEXT = WorkerContext(0, 1, b"f" * 32, 16, CPU)


class Recorder(WorkerConnector):
    """A WorkerConnector that records its calls in a log; several may share one log."""

    per_layer = True

    def __init__(self, log: list[Any] | None = None, descriptor: int = -1) -> None:
        self.log = [] if log is None else log
        self.descriptor = descriptor
        self.finished = FinishedTransfers([], [])
        self.invalid: list[int] = []

    def register_kv_caches(self, cache):
        self.log.append("register_kv_caches")

    def fileno(self):
        return self.descriptor

    def bind_connector_metadata(self, metadata):
        self.log.append(("bind_connector_metadata", metadata))

    def handle_preemptions(self):
        self.log.append("handle_preemptions")

    def start_load_kv(self):
        self.log.append("start_load_kv")

    def wait_for_layer_load(self, layer):
        self.log.append(("wait_for_layer_load", layer))

    def save_kv_layer(self, layer):
        self.log.append(("save_kv_layer", layer))

    def wait_for_save(self):
        self.log.append("wait_for_save")

    def get_finished(self, finished_seq_ids):
        self.log.append(("get_finished", list(finished_seq_ids)))
        finished, self.finished = self.finished, FinishedTransfers([], [])
        return finished

    def get_block_ids_with_load_errors(self):
        taken, self.invalid = self.invalid, []
        return taken

    def build_connector_worker_meta(self):
        self.log.append("build_connector_worker_meta")
        return b""

    def close(self):
        self.log.append("close")


def step(metadata: bytes = b"", finished: tuple[int, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(
        epoch=3,
        step=1,
        new_requests=[],
        cached_requests=CachedRequestData(),
        total_num_scheduled_tokens=0,
        finished_seq_ids=list(finished),
        preempted_seq_ids=[],
        connector_metadata=metadata,
    )


def test_connector_calls_of_a_step_are_in_order() -> None:
    recorder, reports = Recorder(), []
    steps = ConnectorSteps(StepConnector(recorder), 3, 1, Poller(), reports.append)
    steps.before_step(step(b"meta"))
    assert recorder.log == [
        ("bind_connector_metadata", b"meta"),
        "handle_preemptions",
        "start_load_kv",
    ]
    recorder.log.clear()
    steps.after_step(step(finished=(8,)))
    assert recorder.log == [
        "wait_for_save",
        ("get_finished", [8]),
        "build_connector_worker_meta",
    ]
    assert reports == [], "an empty report is not sent"


def test_finished_transfers_are_reported_once_with_epoch_and_rank() -> None:
    recorder, reports = Recorder(), []
    steps = ConnectorSteps(StepConnector(recorder), 3, 1, Poller(), reports.append)
    recorder.finished, recorder.invalid = FinishedTransfers([1], [2]), [9]
    steps.after_step(step())
    steps.after_step(step())
    assert reports == [KVConnectorReport(3, 1, KVConnectorOutput([1], [2], [9]))]


def test_a_readable_descriptor_between_steps_sends_a_report() -> None:
    event_fd = os.eventfd(0)
    recorder, reports, poller = Recorder(descriptor=event_fd), [], Poller()
    steps = ConnectorSteps(StepConnector(recorder), 3, 0, poller, reports.append)
    assert poller.wait(0) == []
    os.eventfd_write(event_fd, 1)
    recorder.finished = FinishedTransfers([], [4])
    steps.report_if_ready(poller.wait(0))
    assert reports == [KVConnectorReport(3, 0, KVConnectorOutput([], [4]))]
    steps.close()
    steps.close()
    assert poller.wait(0) == [], "a closed connector is not polled"
    assert "close" in recorder.log


def test_layers_are_loaded_before_they_run_and_saved_after_it() -> None:
    """Each of these threads is slow at times, and no layer is called twice or too early."""
    num_layers, rng = 12, random.Random(0)
    progress = HostProgress(num_layers)
    log: list[tuple[str, int]] = []

    class SlowRecorder(Recorder):
        def wait_for_layer_load(self, layer: int) -> None:
            time.sleep(rng.choice([0.0, 0.003]))
            log.append(("load", layer))

        def save_kv_layer(self, layer: int) -> None:
            time.sleep(rng.choice([0.0, 0.003]))
            log.append(("save", layer))

    connector = StepConnector(SlowRecorder(), progress, num_layers)
    steps = ConnectorSteps(connector, 3, 0, Poller(), lambda report: None)
    for _ in range(3):
        log.clear()
        steps.before_step(step())
        for layer in range(num_layers):
            progress.begin_layer(layer)
            log.append(("run", layer))
            progress.end_layer(layer)
        steps.after_launch()
        steps.after_step(step())
        for layer in range(num_layers):
            load, run, save = (log.index((what, layer)) for what in ("load", "run", "save"))
            assert load < run < save
        assert len(log) == 3 * num_layers
        assert log != sorted(log, key=lambda call: ("load", "run", "save").index(call[0]))
    steps.close()


def test_a_step_without_copies_calls_no_layer_and_waits_for_none() -> None:
    recorder, progress = Recorder(), HostProgress(2)
    recorder.has_layer_copies = lambda: False  # type: ignore[method-assign]
    steps = ConnectorSteps(StepConnector(recorder, progress, 2), 3, 0, Poller(), print)
    steps.before_step(step())
    progress.begin_layer(1)
    assert progress.address == 0
    steps.after_launch()
    steps.after_step(step())
    steps.close()
    assert not [call for call in recorder.log if "layer" in call[0]]


def test_a_load_that_raises_blocks_no_layer_and_ends_the_step() -> None:
    class Broken(Recorder):
        def wait_for_layer_load(self, layer: int) -> None:
            raise RuntimeError(f"layer {layer}")

    progress = HostProgress(3)
    steps = ConnectorSteps(StepConnector(Broken(), progress, 3), 3, 0, Poller(), print)
    steps.before_step(step())
    progress.begin_layer(2)
    with pytest.raises(RuntimeError, match="layer 0"):
        steps.after_step(step())
    steps.close()


def test_a_step_that_is_abandoned_leaves_no_thread_waiting() -> None:
    progress = HostProgress(3)
    steps = ConnectorSteps(StepConnector(Recorder(), progress, 3), 3, 0, Poller(), print)
    steps.before_step(step())
    steps.close()  # joins the threads


def test_a_third_party_worker_connector_is_created_by_module_path() -> None:
    config = KVTransferConfig(
        kv_connector="Outside", kv_connector_module_path="tests.fakes.outside_connector"
    )
    assert isinstance(create_worker_connector(config, CONTEXT), OutsideWorker)
    assert create_worker_connector(KVTransferConfig(), CONTEXT) is NO_CONNECTOR


def test_multi_connector_forwards_every_call_to_every_child_in_order(monkeypatch) -> None:
    """Finished sends are reported per child; loads and errors are merged."""
    log: list[Any] = []
    monkeypatch.setattr(multi, "create_worker_connector", lambda config, context: Recorder(log))
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [{"kv_connector": "A"}, {"kv_connector": "B"}]},
    )
    connector = MultiWorker(config, CONTEXT)
    connector.register_kv_caches(None)
    connector.bind_connector_metadata(pack(MultiStep([b"a", b"b"])))
    connector.handle_preemptions()
    connector.start_load_kv()
    connector.wait_for_layer_load(0)
    connector.save_kv_layer(0)
    connector.wait_for_save()
    assert log == [
        each
        for call in (
            ["register_kv_caches"] * 2,
            [("bind_connector_metadata", b"a"), ("bind_connector_metadata", b"b")],
            ["handle_preemptions"] * 2,
            ["start_load_kv"] * 2,
            [("wait_for_layer_load", 0)] * 2,
            [("save_kv_layer", 0)] * 2,
            ["wait_for_save"] * 2,
        )
        for each in call
    ]
    first, second = connector.children
    first.finished, second.finished = FinishedTransfers([1], [2]), FinishedTransfers([1, 3], [])
    first.invalid, second.invalid = [5], [6]
    assert connector.get_finished([]) == FinishedTransfers([], [2]), "sends are reported per child"
    assert connector.get_block_ids_with_load_errors() == [5, 6]
    report = multi.unpack(connector.build_connector_worker_meta(), multi.MultiReport)
    assert report.sending == [[1], [1, 3]]
    assert connector.build_connector_worker_meta() == b""
    connector.close()
