"""What a worker does for its KV connector around each step, and between two steps.

    bind ─▶ handle_preemptions ─▶ start_load_kv ─▶ [ the step ] ─▶ wait_for_save ─▶ report
                                      per layer: wait_for_layer_load, save_kv_layer

Owns the connector of one epoch. What it has finished is told to the engine before the answer
to the step, so that nobody takes tokens for good that came of KV that was never loaded.
"""

from collections.abc import Callable, Sequence
from typing import Final

from proto.kv_connector import KVConnectorOutput, KVConnectorReport
from proto.scheduler_output import SchedulerOutput
from proto.sockets import Poller
from worker.kv_connector.base import WorkerConnector
from worker.kv_connector.nothing import NO_CONNECTOR

_NEVER: Final = -1


class ConnectorSteps:
    """Drives a connector; `tell` sends a report to the engine of this epoch."""

    def __init__(
        self,
        connector: WorkerConnector,
        epoch: int,
        rank: int,
        poller: Poller,
        tell: Callable[[KVConnectorReport], None],
    ) -> None:
        self.connector = connector
        self._epoch = epoch
        self._rank = rank
        self._poller = poller
        self._tell = tell
        self._descriptor = connector.fileno()
        if self._descriptor != _NEVER:
            poller.add(self._descriptor)

    def begin(self, step: SchedulerOutput) -> None:
        """A step is about to be computed, or to be queued on a device."""
        self.connector.bind_connector_metadata(step.connector_metadata)
        self.connector.handle_preemptions()
        self.connector.start_load_kv()

    def end(self, step: SchedulerOutput) -> None:
        """It is, and its answer is about to be sent."""
        self.connector.wait_for_save()
        self._report(step.finished_seq_ids)

    def report_if_ready(self, readable: Sequence[object]) -> None:
        """Between two steps; readable: what the poller has found."""
        if self._descriptor in readable:
            self._report(())

    def close(self) -> None:
        """The epoch ends: returns when no copy touches the KV cache any more."""
        if self._descriptor != _NEVER:
            self._poller.remove(self._descriptor)
            self._descriptor = _NEVER
        self.connector.close()

    def _report(self, finished_seq_ids: Sequence[int]) -> None:
        finished = self.connector.get_finished(finished_seq_ids)
        output = KVConnectorOutput(
            finished.sending,
            finished.recving,
            self.connector.take_invalid_blocks(),
            self.connector.build_connector_worker_meta(),
        )
        if not output.is_empty:
            self._tell(KVConnectorReport(self._epoch, self._rank, output))


def no_connector_steps(poller: Poller) -> ConnectorSteps:
    """Before there is a KV cache."""
    return ConnectorSteps(NO_CONNECTOR, 0, 0, poller, lambda report: None)
