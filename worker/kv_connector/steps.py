"""Calls of a KV connector around each step, for each of its layers, and between steps.

    before_step    bind ─▶ handle_preemptions ─▶ start_load_kv
    the step       a thread: wait_for_layer_load(0), (1) …      another: save_kv_layer(0), (1) …
    after_step     it is computed: wait_for_save ─▶ report ─▶ its result is sent

Finished transfers are reported to the engine before the result of the step, so that the engine
never accepts tokens that were computed from KV whose load failed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from proto.messages.kv_connector import KVConnectorOutput, KVConnectorReport
from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.sockets import NO_DESCRIPTOR, Poller
from worker.kv_connector.base import NO_CONNECTOR, WorkerConnector
from worker.layers.layer_progress import LayerProgress


@dataclass(frozen=True)
class StepConnector:
    """A connector, and the progress of the steps that it copies for; None: not by layer.

    num_layers: with KV.
    """

    connector: WorkerConnector
    progress: LayerProgress | None = None
    num_layers: int = 0


class ConnectorSteps:
    """Calls the connector of one epoch; `send` sends a report to the engine of that epoch.

    executor: of the two threads for layers; one of its own if None.
    """

    def __init__(
        self,
        step_connector: StepConnector,
        epoch: int,
        rank: int,
        poller: Poller,
        send: Callable[[KVConnectorReport], None],
        executor: Executor | None = None,
    ) -> None:
        self.connector = step_connector.connector
        self._progress = step_connector.progress
        self._layers = range(step_connector.num_layers)
        self._executor = executor or ThreadPoolExecutor(2, "kv layers")
        self._layer_calls: list[Future[None]] = []
        self._copied_step = 0  # the one to which these calls belong
        self._epoch = epoch
        self._rank = rank
        self._poller = poller
        self._send = send
        self._descriptor = self.connector.fileno()
        if self._descriptor != NO_DESCRIPTOR:
            poller.add(self._descriptor)

    def before_step(self, step: SchedulerOutput) -> None:
        """Start the copies of a step that is about to be computed or queued on a device."""
        if self._layer_calls:  # of a step that is queued on a device
            self._finish_layers()
            self.connector.wait_for_save()
        self._copied_step = step.step
        self.connector.bind_connector_metadata(step.connector_metadata)
        self.connector.handle_preemptions()
        self.connector.start_load_kv()
        progress = self._progress
        if progress is None:
            return
        has_copies = self.connector.has_layer_copies()
        progress.begin_step(has_copies=has_copies)
        if has_copies and progress.loads_ahead:
            self._load_layers(progress)
        elif has_copies:
            self._call_for_layers(self._load_layers, progress)
            self._call_for_layers(self._save_layers, progress)

    def after_launch(self) -> None:
        """Start the copies that follow the layers of a step that is queued on a device."""
        progress = self._progress
        if progress is not None and progress.loads_ahead and self.connector.has_layer_copies():
            self._call_for_layers(self._save_layers, progress)

    def after_step(self, step: SchedulerOutput) -> None:
        """Report finished transfers of a step that is computed, before its result is sent."""
        if not self._layer_calls or self._copied_step == step.step:
            self._finish_layers()
            self.connector.wait_for_save()
        self._report(step.finished_seq_ids)

    def report_if_ready(self, readable: Sequence[object]) -> None:
        """Report transfers that have finished between two steps.

        readable: what the poller has returned.
        """
        if self._descriptor in readable:
            self._report(())

    def close(self) -> None:
        """End the epoch; when this returns, no copy accesses the KV cache any more."""
        if self._descriptor != NO_DESCRIPTOR:
            self._poller.remove(self._descriptor)
            self._descriptor = NO_DESCRIPTOR
        self._finish_layers()
        self._executor.shutdown()
        self.connector.close()

    def _call_for_layers(
        self, call: Callable[[LayerProgress], None], progress: LayerProgress
    ) -> None:
        self._layer_calls.append(self._executor.submit(call, progress))

    def _load_layers(self, progress: LayerProgress) -> None:
        try:
            for layer in self._layers:
                self.connector.wait_for_layer_load(layer)
                progress.note_loaded(layer)
        finally:
            progress.note_loaded(self._layers[-1])  # after an error: no step waits forever

    def _save_layers(self, progress: LayerProgress) -> None:
        for layer in self._layers:
            progress.wait_computed(layer)
            self.connector.save_kv_layer(layer)

    def _finish_layers(self) -> None:
        """Wait until all layers are loaded and saved; raise what a call of the connector raised."""
        if self._progress is not None:
            self._progress.end_step()
        calls, self._layer_calls = self._layer_calls, []
        for call in calls:
            call.result()

    def _report(self, finished_seq_ids: Sequence[int]) -> None:
        finished = self.connector.get_finished(finished_seq_ids)
        output = KVConnectorOutput(
            finished.sending,
            finished.recving,
            self.connector.get_block_ids_with_load_errors(),
            self.connector.build_connector_worker_meta(),
            self.connector.get_state_slots_with_load_errors(),
        )
        if not output.is_empty:
            self._send(KVConnectorReport(self._epoch, self._rank, output))


def no_connector_steps(poller: Poller) -> ConnectorSteps:
    """ConnectorSteps for a worker that has no KV cache yet."""
    return ConnectorSteps(StepConnector(NO_CONNECTOR), 0, 0, poller, lambda report: None)
