"""Calls of a KV connector around each step, around each layer's attention, and between steps.

    bind ─▶ handle_preemptions ─▶ start_load_kv ─▶ [ the step ] ─▶ wait_for_save ─▶ report
                                      per layer: wait_for_layer_load, save_kv_layer

Finished transfers are reported to the engine before the result of the step, so that the engine
never accepts tokens that were computed from KV whose load failed.
"""

from collections.abc import Callable, Sequence

import torch

from proto.kv_connector import KVConnectorOutput, KVConnectorReport
from proto.scheduler_output import SchedulerOutput
from proto.sockets import NO_DESCRIPTOR, Poller
from worker.attention.base import AttentionBackend, AttentionInputs
from worker.kv_connector.base import NO_CONNECTOR, WorkerConnector
from worker.layers.rotary import Rotation


class ConnectorSteps:
    """Calls the connector of one epoch; `send` sends a report to the engine of that epoch."""

    def __init__(
        self,
        connector: WorkerConnector,
        epoch: int,
        rank: int,
        poller: Poller,
        send: Callable[[KVConnectorReport], None],
    ) -> None:
        self.connector = connector
        self._epoch = epoch
        self._rank = rank
        self._poller = poller
        self._send = send
        self._descriptor = connector.fileno()
        if self._descriptor != NO_DESCRIPTOR:
            poller.add(self._descriptor)

    def before_step(self, step: SchedulerOutput) -> None:
        """Start the copies of a step that is about to be computed or queued on a device."""
        self.connector.bind_connector_metadata(step.connector_metadata)
        self.connector.handle_preemptions()
        self.connector.start_load_kv()

    def after_step(self, step: SchedulerOutput) -> None:
        """Report finished transfers, before the result of the step is sent."""
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
        self.connector.close()

    def _report(self, finished_seq_ids: Sequence[int]) -> None:
        finished = self.connector.get_finished(finished_seq_ids)
        output = KVConnectorOutput(
            finished.sending,
            finished.recving,
            self.connector.get_block_ids_with_load_errors(),
            self.connector.build_connector_worker_meta(),
        )
        if not output.is_empty:
            self._send(KVConnectorReport(self._epoch, self._rank, output))


def no_connector_steps(poller: Poller) -> ConnectorSteps:
    """ConnectorSteps for a worker that has no KV cache yet."""
    return ConnectorSteps(NO_CONNECTOR, 0, 0, poller, lambda report: None)


class LayerHooks:
    """AttentionBackend that waits for a layer's load before attention and stores the layer after.

    The fused kernel for all layers and CUDA graphs do not know it, so a step with LayerHooks runs
    layer by layer.
    """

    def __init__(self, attention: AttentionBackend, connector: WorkerConnector) -> None:
        self._attention = attention
        self._connector = connector
        self.query_split = attention.query_split

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        self._attention.plan(inputs)

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._connector.wait_for_layer_load(layer)
        attended = self._attention.run(layer, query, key, value, rotation, sinks)
        self._connector.save_kv_layer(layer)
        return attended


def with_hooks(attention: AttentionBackend, connector: WorkerConnector) -> AttentionBackend:
    """Wrap attention in LayerHooks if the connector needs calls for each layer."""
    return LayerHooks(attention, connector) if connector.per_layer else attention
