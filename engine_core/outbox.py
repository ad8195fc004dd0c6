"""What is on its way from the engine to the front ends.

Owns outputs, acceptances and the statistics between the moment they arise and the
moment they are sent. One message per front end and flush.
"""

import time
from collections.abc import Callable

from engine_core.kv_events import NO_KV_EVENTS, KVEventSink
from engine_core.request import Request
from engine_core.scheduler.client_outputs import ClientOutputs
from engine_core.scheduler.scheduler import Scheduler
from engine_core.transport import FrontEndLinks
from proto.engine_io import AdminReply, EngineCoreOutput, EngineCoreOutputs

STATS_CLIENT = 0
"""The front end that keeps the statistics."""


class Outbox:
    """Collects per front end; `flush` sends."""

    def __init__(
        self,
        front_ends: FrontEndLinks,
        scheduler: Scheduler,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        kv_events: KVEventSink = NO_KV_EVENTS,
    ) -> None:
        self._front_ends = front_ends
        self._scheduler = scheduler
        self._epoch = epoch
        self._clock = clock
        self._kv_events = kv_events
        self._accepted: dict[int, list[int]] = {}
        self._outputs: ClientOutputs = {}
        self._alone: dict[int, list[int]] = {}

    def accept(self, client: int, request_id: int) -> None:
        """A request was taken in."""
        self._accepted.setdefault(client, []).append(request_id)

    def add(self, client: int, output: EngineCoreOutput) -> None:
        """An output that no step made."""
        self._outputs.setdefault(client, []).append(output)

    def add_step(self, outputs: ClientOutputs) -> None:
        """The outputs of a step."""
        for client, each in outputs.items():
            self._outputs.setdefault(client, []).extend(each)

    def add_trials(self, requests: list[Request]) -> None:
        """These are computed with nothing beside them from now on."""
        for request in requests:
            self._alone.setdefault(request.client_index, []).append(request.request_id)

    def reply(self, client: int, reply: AdminReply) -> None:
        """Answer a call, at once."""
        self._front_ends.send(client, reply)

    def flush(self) -> None:
        """Send everything. The statistics go out even if there is nothing else to say."""
        self._kv_events.publish()
        outputs, self._outputs = self._outputs, {}
        accepted, self._accepted = self._accepted, {}
        alone, self._alone = self._alone, {}
        for client in {STATS_CLIENT, *outputs, *accepted, *alone}:
            self._front_ends.send(
                client,
                EngineCoreOutputs(
                    epoch=self._epoch,
                    step=self._scheduler.step,
                    timestamp=self._clock(),
                    outputs=outputs.get(client, []),
                    accepted=accepted.get(client, []),
                    stats=self._scheduler.take_stats() if client == STATS_CLIENT else None,
                    alone=alone.get(client, []),
                ),
            )
