"""What is on its way from the engine to the front ends.

Owns outputs, acceptances, answers and the statistics between the moment they arise and the
moment they are sent. One message per front end and flush, but for answers to operators.
"""

import time
from collections.abc import Callable

from engine_core.kv_events import NO_KV_EVENTS, KVEventSink
from engine_core.request import Request
from engine_core.scheduler.result import ClientOutputs
from engine_core.scheduler.scheduler import Scheduler
from engine_core.transport import FrontEndLinks
from engine_core.view.views import NO_VIEWS, Views
from proto.engine_io import AdminReply, EngineCoreOutput, EngineCoreOutputs, RequestProgress


class Outbox:
    """Collects per front end; `flush` sends."""

    def __init__(
        self,
        front_ends: FrontEndLinks,
        scheduler: Scheduler,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        kv_events: KVEventSink = NO_KV_EVENTS,
        views: Views = NO_VIEWS,
    ) -> None:
        self._front_ends = front_ends
        self._scheduler = scheduler
        self._epoch = epoch
        self._clock = clock
        self._kv_events = kv_events
        self._views = views
        self._accepted: dict[int, list[int]] = {}
        self._outputs: ClientOutputs = {}
        self._progress: dict[int, list[RequestProgress]] = {}
        self._replies: list[tuple[int, AdminReply]] = []

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

    def begins(self, request: Request, *, alone: bool) -> None:
        """Say at once that a request is begun with: deciding its step may be the end."""
        self._front_ends.send(
            request.client_index,
            EngineCoreOutputs(
                epoch=self._epoch,
                step=self._scheduler.step,
                timestamp=self._clock(),
                alone=[request.request_id] if alone else [],
                progress=[RequestProgress(request.request_id, 0, 0)],
            ),
        )

    def add_progress(self, progress: list[tuple[Request, int]]) -> None:
        """So far these are computed: the tokens in complete steps."""
        for request, num_tokens in progress:
            self._progress.setdefault(request.client_index, []).append(
                RequestProgress(request.request_id, num_tokens, request.num_computed_tokens)
            )

    def reply(self, client: int, reply: AdminReply) -> None:
        """The answer to a call."""
        self._replies.append((client, reply))

    def flush(self) -> None:
        """Send everything. The statistics go out even if there is nothing else to say.

        They ride with what one front end is told anyway, if it is alive.
        """
        self._kv_events.publish(self._scheduler.kv_transfer.take_events())
        replies, self._replies = self._replies, []
        for client, reply in replies:
            self._front_ends.send(client, reply)
        outputs, self._outputs = self._outputs, {}
        accepted, self._accepted = self._accepted, {}
        progress, self._progress = self._progress, {}
        told, alive = {*outputs, *accepted, *progress}, self._front_ends.alive
        clients = [each for each in alive if each in told] or alive[:1]
        stats = self._scheduler.take_stats() if clients else None
        self._views.count(outputs, stats)
        for index, client in enumerate(clients):
            self._front_ends.send(
                client,
                EngineCoreOutputs(
                    epoch=self._epoch,
                    step=self._scheduler.step,
                    timestamp=self._clock(),
                    outputs=outputs.get(client, []),
                    accepted=accepted.get(client, []),
                    stats=stats if index == 0 else None,
                    progress=progress.get(client, []),
                ),
            )
