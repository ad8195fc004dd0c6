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
from proto.kv_connector import KVConnectorOutput
from proto.lifecycle import FrontEndStalled, Notice, Paused
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput
from proto.sockets import Link, Poller

logger = logging.getLogger("tokend.service")


class EngineIO:
    """Waits for messages and serves supervisor and front ends, also while a step computes.

    poller: polls all channels of the engine; those of the front ends are added here.
    """

    def __init__(
        self,
        commands: SupervisorCommands,
        front_ends: FrontEndLinks,
        poller: Poller,
        scheduler: Scheduler,
        input_processor: InputProcessor,
        output_dispatcher: OutputDispatcher,
        grammars: Grammars = NO_GRAMMARS,
        views: Views = NO_VIEWS,
    ) -> None:
        self._commands = commands
        self._supervisor = commands.link
        self._front_ends = front_ends
        self._poller = poller
        self._scheduler = scheduler
        self._input_processor = input_processor
        self._output_dispatcher = output_dispatcher
        self._heartbeat = HeartbeatSender(commands.link)
        self._views = views
        self._reported_pause = scheduler.pause_mode
        for link in front_ends.links:
            poller.add(link)
        self._grammars = grammars
        self._connector = scheduler.kv_transfer.connector
        for descriptor in (grammars.descriptor, self._connector.fileno()):
            if descriptor != NO_DESCRIPTOR:
                poller.add(descriptor)

    @property
    def stopped(self) -> bool:
        """Whether the supervisor has sent `Shutdown`."""
        return self._commands.stopped

    def take_worker_epochs(self) -> list[int]:
        """Return the epochs of new workers; only the last one is alive."""
        return self._commands.take_worker_epochs()

    def serve(self, timeout_seconds: float | None = None) -> bool:
        """Wait for a message on any channel, and handle those of supervisor and front ends.

        Returns early if a live view is due, or if a request, a session or retained KV expires; it
        ends what has expired. Returns False if nothing happened within the time.
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
            self._report_pause()  # before a reply tells a client that the engine is paused
            self._output_dispatcher.flush()
        self._drop_stalled()
        return bool(ready or received or overdue) or self._views.seconds_to_next is not None

    def publish(self, outputs: ClientOutputs) -> None:
        """Send the outputs of a completed step to the front ends, and a heartbeat."""
        self._heartbeat.beat(self._scheduler.worker_epoch, self._scheduler.step)
        self.tell(outputs)

    def announce(self, progress: list[tuple[Request, int]]) -> None:
        """Send progress, by which front ends count crashes, before a step can crash.

        progress: requests, and tokens of theirs in complete steps.
        """
        if progress:
            self._output_dispatcher.add_progress(progress)
            self._output_dispatcher.flush()

    def tell(self, outputs: ClientOutputs) -> None:
        """Send outputs that belong to no step to the front ends."""
        self._output_dispatcher.add_step(outputs)
        self._output_dispatcher.flush()
        self._drop_stalled()

    def _wait(self, timeout_seconds: float | None) -> list[Link | int]:
        """Return what is readable after at most this time; commands of the supervisor are handled.

        A `Ping` of the supervisor does not end the wait.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            ready = self._poller.wait(timeout_seconds)
            if self._supervisor not in ready or self._handle_commands() or len(ready) > 1:
                return ready
            if end is not None:
                timeout_seconds = max(0.0, end - time.monotonic())

    def _handle_commands(self) -> bool:
        """Handle commands of the supervisor. Return whether there were any besides a `Ping`."""
        any_commands = self._commands.receive()
        for pause in self._commands.take_pauses():
            if pause.mode is None:
                self._scheduler.resume()
            else:
                self._scheduler.pause(pause.mode)
            self._reported_pause = pause.mode
        for each in self._commands.take_front_ends():
            old, new = self._front_ends.replace(each.index, each.incarnation)
            for link in old:
                self._poller.remove(link)
                link.close()
            self._poller.add(new)
            self._views.watch(each.index, wanted=False)
            ended = self._scheduler.abort_client(each.index)
            logger.warning("front end %d died: %d requests are aborted", each.index, ended)
            self._output_dispatcher.flush()  # the gauges that the dead front end received are lost
        return any_commands

    def _report_pause(self) -> None:
        if self._scheduler.pause_mode != self._reported_pause:
            self._reported_pause = self._scheduler.pause_mode
            self._supervisor.send(Paused(self._reported_pause))

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
"""After this time without a message the engine runs its integrity check."""

SYNCHRONOUS: Final = 1
"""Steps in flight: the next is scheduled when the tokens of the last are known."""
OVERLAPPED: Final = 2
"""Steps in flight: the next is scheduled, and waits at the workers, while one computes."""


class BusyLoop:
    """Schedules steps and processes their results, with up to `max_in_flight` steps at the workers.

    check_when_idle: an integrity check that raises IntegrityError; each iteration is a slice of a
    few milliseconds. It starts after IDLE_SECONDS without work and stops at the next message.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: WorkerGroup,
        io: EngineIO,
        check_when_idle: Callable[[], Iterator[None]],
        max_in_flight: int = SYNCHRONOUS,
        grammars: Grammars = NO_GRAMMARS,
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._io = io
        self._check_when_idle = check_when_idle
        self._max_in_flight = max_in_flight
        self._grammars = grammars
        self._in_flight: deque[SchedulerOutput] = deque()

    def run(self) -> None:
        """Receive, update, schedule and send until `Shutdown`; wait if there is nothing to do.

        Messages of front ends are handled before results, so an abort precedes the tokens that
        arrive at the same time. A worker that sends an invalid result is reported to the
        supervisor, and nothing is sent until new workers are connected.
        """
        may_have_work = True
        while True:
            self._receive(may_have_work)
            if self._io.stopped:
                return
            for epoch in self._io.take_worker_epochs():
                self._change_workers(epoch)
            try:
                results = self._workers.receive()
                for report in self._workers.take_reports():
                    self._update_from_connector(report)
                for result in results:
                    self._update(result)
                self._exchange_masks()
                may_have_work = self._schedule_and_send()
                self._exchange_masks()
            except WorkerFailedError as error:
                self._workers.distrust(error)
                may_have_work = False

    def close(self) -> None:
        """Close the KV connector; the engine stops."""
        self._scheduler.kv_transfer.close()

    def _receive(self, may_have_work: bool) -> None:
        """Handle messages that have arrived; wait for one if there is nothing else to do."""
        if may_have_work:
            self._io.serve(0)
        elif self._in_flight:
            self._io.serve()
        elif not self._io.serve(IDLE_SECONDS):
            for _ in self._check_when_idle():
                if self._io.serve(0):
                    return
            self._io.serve()

    def _schedule_and_send(self) -> bool:
        """Schedule and send a step. Return False if nothing can be sent for now."""
        if not self._scheduler.has_work or len(self._in_flight) == self._max_in_flight:
            return False
        if not self._workers.ready:
            return False
        wanted = self._scheduler.kv_transfer.wants_step
        self._scheduler.isolate_suspect()
        output = self._scheduler.schedule()
        self._io.announce(self._scheduler.crash_progress())
        if output.total_num_scheduled_tokens:
            self._in_flight.append(output)
        elif not (
            wanted
            or output.finished_seq_ids
            or output.preempted_seq_ids
            or output.connector_metadata
        ):
            assert self._may_wait, "no request can progress"
            return False
        self._workers.submit(output)
        return True

    @property
    def _may_wait(self) -> bool:
        """Whether a result or a KV transfer is awaited, or there is no work."""
        scheduler = self._scheduler
        return bool(self._in_flight or scheduler.kv_transfer.is_awaited or not scheduler.has_work)

    def _update_from_connector(self, report: KVConnectorOutput) -> None:
        """Process completed KV transfers; a failed one can end a request.

        Without a step in flight this is the only report that their blocks are free.
        """
        outputs = self._scheduler.update_from_connector(report)
        if outputs or not self._in_flight:
            self._io.tell(outputs)

    def _exchange_masks(self) -> None:
        """Order the grammar masks of the oldest step in flight, and send those that are ready."""
        if self._in_flight:
            self._grammars.order_masks(self._in_flight[0])
        for masks in self._grammars.take_masks():
            if self._in_flight and masks.step == self._in_flight[0].step:
                self._workers.submit_masks(masks)

    def _change_workers(self, epoch: int) -> None:
        """Connect new workers; steps in flight are lost with the old ones."""
        self._in_flight.clear()
        self._workers.connect_workers(epoch)
        self._io.tell(self._scheduler.start_over(epoch))

    def _update(self, result: ModelRunnerOutput) -> None:
        """Process the result of the oldest step in flight and publish its outputs."""
        if not self._in_flight or result.step != self._in_flight[0].step:
            _check_empty(result)
            return
        output = self._in_flight.popleft()
        try:
            if violations := self._grammars.violations(output, result):
                self._io.tell(self._scheduler.end_with_errors(violations))
            outputs = self._scheduler.update_from_output(output, result)
        except ImpossibleResultError as error:
            self._io.tell(error.outputs)
            raise WorkerFailedError(0, f"sent an impossible result: {error}") from error
        except EarlyAnswerError as error:
            raise WorkerFailedError(0, str(error)) from error
        self._io.publish(outputs)


def _check_empty(result: ModelRunnerOutput) -> None:
    """Raise WorkerFailedError if a result belongs to no step in flight and is not empty."""
    if result.seq_ids:
        raise WorkerFailedError(0, f"answered step {result.step} unasked")
