"""The one place where the engine waits.

Owns the poller over all links of the engine. Serves supervisor and front ends;
what workers send is left to the stepper.
"""

import logging

from engine_core.intake import Intake
from engine_core.outbox import Outbox
from engine_core.scheduler.client_outputs import ClientOutputs
from engine_core.scheduler.scheduler import Scheduler
from engine_core.transport import FrontEndLinks
from proto.lifecycle import Notice, Shutdown
from proto.sockets import Link, Poller

logger = logging.getLogger("tokend.service")


class Service:
    """Keeps the engine answering, while it idles and while a step computes.

    stopped: the supervisor has asked for the end.
    """

    def __init__(
        self,
        supervisor: Link,
        front_ends: FrontEndLinks,
        workers: list[Link],
        scheduler: Scheduler,
        intake: Intake,
        outbox: Outbox,
    ) -> None:
        self._supervisor = supervisor
        self._front_ends = front_ends
        self._scheduler = scheduler
        self._intake = intake
        self._outbox = outbox
        self._poller = Poller([supervisor, *front_ends.links, *workers])
        self.stopped = False

    def serve(self, timeout_seconds: float | None = None) -> bool:
        """Wait until anything arrives on any link; False when nothing did in that time.

        Returns early where a session has to end for want of input. Handles everything
        that has arrived from supervisor and front ends, also what came after the wait was
        over, and ends the sessions that were at rest for too long.
        """
        limits = (timeout_seconds, self._scheduler.sessions.seconds_to_next_end)
        ready = self._poller.wait(min((each for each in limits if each is not None), default=None))
        if self._supervisor in ready and is_shutdown(self._supervisor):
            self.stopped = True
        received = self._front_ends.receive()
        for client, message in received:
            self._intake.take(client, message)
        overdue = self._scheduler.sessions.end_overdue()
        self._outbox.add_step(overdue)
        if received or overdue:
            self._outbox.flush()
        self._bury_stalled()
        return bool(ready or received or overdue)

    def publish(self, outputs: ClientOutputs) -> None:
        """Tell the front ends what a step brought."""
        self._outbox.add_step(outputs)
        self._outbox.flush()
        self._bury_stalled()

    def _bury_stalled(self) -> None:
        for client, link in self._front_ends.take_stalled():
            self._poller.remove(link)
            link.close()
            ended = self._scheduler.abort_client(client)
            self._supervisor.send(
                Notice(
                    "engine_core",
                    0,
                    f"front end {client} does not read what it is sent: "
                    f"it is given up and its {ended} running requests are aborted",
                )
            )
            self._outbox.flush()


def is_shutdown(supervisor: Link) -> bool:
    """Whether the supervisor has asked for the end."""
    return any(isinstance(message, Shutdown) for message in supervisor.receive())
