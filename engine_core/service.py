"""The one place where the engine waits.

Serves supervisor and front ends; what workers send is left to the stepper, and so are
workers that take over from others.
"""

import logging
import time

from engine_core.intake import Intake
from engine_core.orders import Orders
from engine_core.outbox import Outbox
from engine_core.pulse import Pulse
from engine_core.request import Request
from engine_core.scheduler.result import ClientOutputs
from engine_core.scheduler.scheduler import Scheduler
from engine_core.structured_output.grammars import NO_GRAMMARS, Grammars
from engine_core.transport import FrontEndLinks
from engine_core.view.views import NO_VIEWS, Views
from proto.event_fd import NO_DESCRIPTOR
from proto.lifecycle import FrontEndStalled, Notice, Paused
from proto.sockets import Link, Poller

logger = logging.getLogger("tokend.service")


class Service:
    """Keeps the engine answering, while it idles, while a step computes, while workers load.

    poller: over all links of the engine; those of the front ends are added here.
    """

    def __init__(
        self,
        orders: Orders,
        front_ends: FrontEndLinks,
        poller: Poller,
        scheduler: Scheduler,
        intake: Intake,
        outbox: Outbox,
        grammars: Grammars = NO_GRAMMARS,
        views: Views = NO_VIEWS,
    ) -> None:
        self._orders = orders
        self._supervisor = orders.link
        self._front_ends = front_ends
        self._poller = poller
        self._scheduler = scheduler
        self._intake = intake
        self._outbox = outbox
        self._pulse = Pulse(orders.link)
        self._views = views
        self._pause_told = scheduler.pause_mode
        for link in front_ends.links:
            poller.add(link)
        self._grammars = grammars
        self._connector = scheduler.kv_transfer.connector
        for descriptor in (grammars.descriptor, self._connector.fileno()):
            if descriptor != NO_DESCRIPTOR:
                poller.add(descriptor)

    @property
    def stopped(self) -> bool:
        """The supervisor has asked for the end."""
        return self._orders.stopped

    def take_worker_epochs(self) -> list[int]:
        """The epochs of workers that take over, the last of which counts."""
        return self._orders.take_worker_epochs()

    def serve(self, timeout_seconds: float | None = None) -> bool:
        """Wait until anything arrives on any link; False when nothing did in that time.

        Returns early where a view is due, a session has to end for want of input, or a request or
        the KV that a job keeps because its time is over. Handles everything that has arrived from
        supervisor and front ends, also what came after the wait was over, and ends those.
        """
        self._views.show()  # while the workers compute, if they do
        limits = (
            timeout_seconds,
            self._views.seconds_to_next,
            self._scheduler.sessions.seconds_to_next_end,
            self._scheduler.deadlines.seconds_to_next_end,
            self._scheduler.agent_sessions.seconds_to_next_end,
        )
        ready = self._wait(min((each for each in limits if each is not None), default=None))
        received = self._front_ends.receive()
        for client, message in received:
            self._intake.take(client, message)
        resting = self._scheduler.sessions.end_overdue()
        self._outbox.add_step(resting)
        expired = self._scheduler.agent_sessions.end_overdue()
        overdue = self._intake.end_overdue() or bool(resting) or expired
        if self._grammars.descriptor in ready:
            self._grammars.silence()
            compiled = self._intake.answer_compiled()
        else:
            compiled = False
        if self._connector.fileno() in ready:
            self._connector.attend()
        if received or overdue or compiled:
            self._tell_pause()  # before anybody relies on it
            self._outbox.flush()
        self._bury_stalled()
        return bool(ready or received or overdue) or self._views.seconds_to_next is not None

    def publish(self, outputs: ClientOutputs) -> None:
        """A step is complete: tell the front ends what it brought."""
        self._pulse.beat(self._scheduler.worker_epoch, self._scheduler.step)
        self.tell(outputs)

    def announce(self, progress: list[tuple[Request, int]]) -> None:
        """Tell the front ends what they count crashes by, before there is another one.

        progress: requests, and tokens of theirs in complete steps.
        """
        if progress:
            self._outbox.add_progress(progress)
            self._outbox.flush()

    def tell(self, outputs: ClientOutputs) -> None:
        """Tell the front ends what no step has brought."""
        self._outbox.add_step(outputs)
        self._outbox.flush()
        self._bury_stalled()

    def _wait(self, timeout_seconds: float | None) -> list[Link | int]:
        """What is readable, after at most this time; the supervisor has been obeyed.

        A mere question of the supervisor is no news: idleness is not interrupted by it.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            ready = self._poller.wait(timeout_seconds)
            if self._supervisor not in ready or self._obey() or len(ready) > 1:
                return ready
            if end is not None:
                timeout_seconds = max(0.0, end - time.monotonic())

    def _obey(self) -> bool:
        """Whether there was anything to obey."""
        any_orders = self._orders.receive()
        for pause in self._orders.take_pauses():
            if pause.mode is None:
                self._scheduler.resume()
            else:
                self._scheduler.pause(pause.mode)
            self._pause_told = pause.mode
        for each in self._orders.take_front_ends():
            old, new = self._front_ends.replace(each.index, each.incarnation)
            for link in old:
                self._poller.remove(link)
                link.close()
            self._poller.add(new)
            self._views.watch(each.index, wanted=False)
            ended = self._scheduler.abort_client(each.index)
            logger.warning("front end %d died: %d requests are aborted", each.index, ended)
            self._outbox.flush()  # the gauges that it was told are gone with it
        return any_orders

    def _tell_pause(self) -> None:
        if self._scheduler.pause_mode != self._pause_told:
            self._pause_told = self._scheduler.pause_mode
            self._supervisor.send(Paused(self._pause_told))

    def _bury_stalled(self) -> None:
        for client, link in self._front_ends.take_stalled():
            self._poller.remove(link)
            link.close()
            self._views.watch(client, wanted=False)
            ended = self._scheduler.abort_client(client)
            self._supervisor.send(
                Notice(
                    "engine_core",
                    0,
                    f"front end {client} does not read what it is sent: "
                    f"it is given up and its {ended} running requests are aborted",
                )
            )
            self._supervisor.send(FrontEndStalled(client, self._front_ends.incarnation(client)))
            self._outbox.flush()
