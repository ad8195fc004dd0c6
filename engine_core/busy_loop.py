"""The engine's busy loop: receive, schedule, send, wait for a result, update, publish.

`BusyLoop` owns the order of these and the steps in flight. `EngineIO` is the only place where the
engine waits.

    one in flight     schedule 1 ─▶ compute 1 ─▶ update 1, schedule 2 ─▶ compute 2 ─▶ …
    two in flight     schedule 1, 2 ─▶ compute 1 ─▶ compute 2 ─▶ compute 3 ─▶ …
                                              └ update 1, schedule 3 ┘
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from engine_core.executor.base import WorkerFailedError
from engine_core.executor.worker_group import WorkerGroup
from engine_core.frontend_io import InputProcessor, OutputDispatcher
from engine_core.request import Request
from engine_core.scheduler.result import ClientOutputs, ImpossibleResultError
from engine_core.scheduler.scheduler import Scheduler
from engine_core.structured_output.grammars import NO_GRAMMARS, EarlyAnswerError, Grammars
from engine_core.supervisor_io import HeartbeatSender, SupervisorCommands
from engine_core.transport import FrontEndLinks
from engine_core.view.views import NO_VIEWS, Views
from proto.event_fd import NO_DESCRIPTOR
from proto.kv_transfer import KVConnectorOutput
from proto.lifecycle import FrontEndStalled, Notice, Paused
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput
from proto.sockets import Link, Poller

logger = logging.getLogger("tokend.service")


class EngineIO:
    """Keeps the engine answering, while it idles, while a step computes, while workers load.

    poller: over all links of the engine; those of the front ends are added here.
    """

    def __init__(
        self,
        orders: SupervisorCommands,
        front_ends: FrontEndLinks,
        poller: Poller,
        scheduler: Scheduler,
        intake: InputProcessor,
        outbox: OutputDispatcher,
        grammars: Grammars = NO_GRAMMARS,
        views: Views = NO_VIEWS,
    ) -> None:
        self._commands = orders
        self._supervisor = orders.link
        self._front_ends = front_ends
        self._poller = poller
        self._scheduler = scheduler
        self._input_processor = intake
        self._output_dispatcher = outbox
        self._pulse = HeartbeatSender(orders.link)
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
        return self._commands.stopped

    def take_worker_epochs(self) -> list[int]:
        """The epochs of workers that take over, the last of which counts."""
        return self._commands.take_worker_epochs()

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
            self._input_processor.take(client, message)
        resting = self._scheduler.sessions.end_overdue()
        self._output_dispatcher.add_step(resting)
        expired = self._scheduler.agent_sessions.end_overdue()
        overdue = self._input_processor.end_overdue() or bool(resting) or expired
        if self._grammars.descriptor in ready:
            self._grammars.silence()
            compiled = self._input_processor.answer_compiled()
        else:
            compiled = False
        if self._connector.fileno() in ready:
            self._connector.attend()
        if received or overdue or compiled:
            self._tell_pause()  # before anybody relies on it
            self._output_dispatcher.flush()
        self._drop_stalled()
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
            self._output_dispatcher.add_progress(progress)
            self._output_dispatcher.flush()

    def tell(self, outputs: ClientOutputs) -> None:
        """Tell the front ends what no step has brought."""
        self._output_dispatcher.add_step(outputs)
        self._output_dispatcher.flush()
        self._drop_stalled()

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
        any_orders = self._commands.receive()
        for pause in self._commands.take_pauses():
            if pause.mode is None:
                self._scheduler.resume()
            else:
                self._scheduler.pause(pause.mode)
            self._pause_told = pause.mode
        for each in self._commands.take_front_ends():
            old, new = self._front_ends.replace(each.index, each.incarnation)
            for link in old:
                self._poller.remove(link)
                link.close()
            self._poller.add(new)
            self._views.watch(each.index, wanted=False)
            ended = self._scheduler.abort_client(each.index)
            logger.warning("front end %d died: %d requests are aborted", each.index, ended)
            self._output_dispatcher.flush()  # the gauges that it was told are gone with it
        return any_orders

    def _tell_pause(self) -> None:
        if self._scheduler.pause_mode != self._pause_told:
            self._pause_told = self._scheduler.pause_mode
            self._supervisor.send(Paused(self._pause_told))

    def _drop_stalled(self) -> None:
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
            self._output_dispatcher.flush()


IDLE_SECONDS: Final = 1.0
"""Without any message for so long, the engine has time for its integrity check."""

SYNCHRONOUS: Final = 1
"""Steps in flight: the next is scheduled when the tokens of the last are known."""
OVERLAPPED: Final = 2
"""Steps in flight: the next is scheduled, and waits at the workers, while one computes."""


class BusyLoop:
    """Keeps up to `max_in_flight` steps with the workers, one crew of workers after the other.

    More than one needs a scheduler that counts placeholders; without them it has
    nothing to add to what is in flight.
    check_when_idle: raises when the books of the engine do not add up; begun when a
    second has gone by without work or messages, and given up, however far it is, when
    any come.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        crew: WorkerGroup,
        service: EngineIO,
        check_when_idle: Callable[[], Iterator[None]],
        max_in_flight: int = SYNCHRONOUS,
        grammars: Grammars = NO_GRAMMARS,
    ) -> None:
        self._scheduler = scheduler
        self._crew = crew
        self._service = service
        self._check_when_idle = check_when_idle
        self._max_in_flight = max_in_flight
        self._grammars = grammars
        self._in_flight: deque[SchedulerOutput] = deque()

    def run(self) -> None:
        """Step while there is work, sleep while there is none, until told to stop.

        Front ends are served before results are taken in, so aborts count before
        the tokens that arrive with them. A worker that sends nonsense is as good as dead: the
        supervisor ends it, and until others come nothing is sent.
        """
        may_have_work = True
        while True:
            self._listen(may_have_work)
            if self._service.stopped:
                return
            for epoch in self._service.take_worker_epochs():
                self._change_workers(epoch)
            try:
                results = self._crew.receive()
                for report in self._crew.take_reports():
                    self._note(report)
                for result in results:
                    self._take(result)
                self._mask()
                may_have_work = self._send()
                self._mask()
            except WorkerFailedError as error:
                self._crew.distrust(error)
                may_have_work = False

    def close(self) -> None:
        """The engine ends."""
        self._scheduler.kv_transfer.close()

    def _listen(self, may_have_work: bool) -> None:
        """Serve what has arrived, or wait for something if there is nothing else to do."""
        if may_have_work:
            self._service.serve(0)
        elif self._in_flight:
            self._service.serve()
        elif not self._service.serve(IDLE_SECONDS):
            for _ in self._check_when_idle():
                if self._service.serve(0):
                    return
            self._service.serve()

    def _send(self) -> bool:
        """Schedule one more step; False when nothing was sent, before something arrives."""
        if not self._scheduler.has_work or len(self._in_flight) == self._max_in_flight:
            return False
        if not self._crew.ready:
            return False
        wanted = self._scheduler.kv_transfer.wants_step
        self._scheduler.isolate_suspect()
        output = self._scheduler.schedule()
        self._service.announce(self._scheduler.crash_progress())
        if output.total_num_scheduled_tokens:
            self._in_flight.append(output)
        elif not (
            wanted
            or output.finished_handles
            or output.preempted_handles
            or output.connector_metadata
        ):
            assert self._may_wait, "no request can progress"
            return False
        self._crew.submit(output)
        return True

    @property
    def _may_wait(self) -> bool:
        """Something will come that lets somebody go on, or nobody wants to."""
        scheduler = self._scheduler
        return bool(self._in_flight or scheduler.kv_transfer.is_awaited or not scheduler.has_work)

    def _note(self, report: KVConnectorOutput) -> None:
        """Copies of the KV connector are over; who relied on one that failed may be as well.

        Without a step in flight nothing else would say that their blocks are free.
        """
        outputs = self._scheduler.update_from_connector(report)
        if outputs or not self._in_flight:
            self._service.tell(outputs)

    def _mask(self) -> None:
        """Have the masks of the oldest step made, and hand on those that are."""
        if self._in_flight:
            self._grammars.order_masks(self._in_flight[0])
        for masks in self._grammars.take_masks():
            if self._in_flight and masks.step == self._in_flight[0].step:
                self._crew.submit_masks(masks)

    def _change_workers(self, epoch: int) -> None:
        """Whatever was in flight is lost with the workers that died."""
        self._in_flight.clear()
        self._crew.connect_workers(epoch)
        self._service.tell(self._scheduler.start_over(epoch))

    def _take(self, result: ModelRunnerOutput) -> None:
        """Update from the answer to the oldest step in flight."""
        if not self._in_flight or result.step != self._in_flight[0].step:
            _check_empty(result)
            return
        output = self._in_flight.popleft()
        try:
            if violations := self._grammars.violations(output, result):
                self._service.tell(self._scheduler.end_with_errors(violations))
            outputs = self._scheduler.update_from_output(output, result)
        except ImpossibleResultError as error:
            self._service.tell(error.outputs)
            raise WorkerFailedError(0, f"sent an impossible result: {error}") from error
        except EarlyAnswerError as error:
            raise WorkerFailedError(0, str(error)) from error
        self._service.publish(outputs)


def _check_empty(result: ModelRunnerOutput) -> None:
    """Steps that only carried finished or preempted handles are answered by nothing."""
    if result.handles:
        raise WorkerFailedError(0, f"answered step {result.step} unasked")
