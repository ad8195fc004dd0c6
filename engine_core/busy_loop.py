"""The engine's busy loop: receive, schedule, send, wait for a result, update, publish.

Start with `BusyLoop.run_until_shutdown`; it owns the order of these and the steps in flight.
`EngineIO` is where the engine waits: it receives the messages of front ends and supervisor and
publishes outputs.

    one in flight     schedule 1 ─▶ compute 1 ─▶ update 1, schedule 2 ─▶ compute 2 ─▶ …
    two in flight     schedule 1, 2 ─▶ compute 1 ─▶ compute 2 ─▶ compute 3 ─▶ …
                                              └ update 1, schedule 3 ┘
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from engine_core.adapters import AdapterRegistry
from engine_core.frontend_io import InputProcessor, OutputDispatcher
from engine_core.kv_cache.integrity import check_in_slices
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd
from engine_core.scheduler.result import ImpossibleResultError
from engine_core.scheduler.scheduler import Scheduler
from engine_core.structured_output.manager import NO_VIOLATIONS, StructuredOutputManager
from engine_core.supervisor_io import SupervisorIO
from engine_core.transport import FrontEndLinks
from engine_core.worker_group import WorkerFailedError, WorkerGroup
from proto.errors import TokendError
from proto.messages.kv_connector import KVConnectorOutput
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.log_lines import FIELDS
from proto.runtime.sockets import NO_DESCRIPTOR, Link, Poller

logger = logging.getLogger("tokend.busy_loop")

IDLE_SECONDS: Final = 1.0
"""After this time without a message the engine runs its integrity check."""
MAX_LISTED_REQUESTS: Final = 50
"""Ids in the log line about the requests of a front end that is gone."""

SYNCHRONOUS: Final = 1
"""Steps in flight: the next is scheduled when the tokens of the last are known."""
OVERLAPPED: Final = 2
"""Steps in flight: the next is scheduled, and waits at the workers, while one computes."""


class IntegrityError(TokendError):
    """The bookkeeping of the KV cache is inconsistent, so outputs could mix requests."""


class BusyLoop:
    """Schedules steps and processes their results, with up to `max_in_flight` steps at the workers.

    structured_output: makes the masks of steps with grammars; None without such requests.
    adapters: None if none are served.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KVCacheManager,
        workers: WorkerGroup,
        io: "EngineIO",
        max_in_flight: int = SYNCHRONOUS,
        structured_output: StructuredOutputManager | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._adapters = adapters
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._workers = workers
        self._io = io
        self._max_in_flight = max_in_flight
        self._structured_output = structured_output
        self._in_flight: deque[SchedulerOutput] = deque()

    def run_until_shutdown(self) -> None:
        """Serve requests until the supervisor sends `Shutdown`.

        If a worker sends an invalid result, the supervisor replaces all workers, and nothing is
        scheduled until the new ones are ready.
        """
        self._receive(wait=False)
        while not self._io.is_stopped:
            try:
                self._run_iteration()
            except WorkerFailedError as error:
                self._workers.request_replacement(error)

    def _run_iteration(self) -> None:
        step = self._schedule()
        if step is not None:
            self._workers.send_step(step)
        self._exchange_masks()
        self._exchange_adapters()  # before the wait: requests may wait for nothing else
        self._receive(wait=step is None)
        if self._io.is_stopped:
            return
        results = self._workers.receive_results()
        for report in self._workers.pop_kv_reports():
            self._update_from_connector(report)
        for result in results:
            self._update_and_publish(result)
        self._exchange_masks()
        self._exchange_adapters()
        self._io.answer_profile_call()

    def _receive(self, *, wait: bool) -> None:
        """Process messages of front ends and supervisor, and connect new workers.

        Messages precede results, so an abort precedes tokens that arrive at the same time.
        wait: for a message or a result, because there is nothing to schedule.
        """
        if not wait:
            self._io.receive_messages(0)
        elif self._in_flight:
            self._io.receive_messages()
        elif not self._io.receive_messages(IDLE_SECONDS):
            if self._structured_output is not None and self._workers.is_ready:
                self._structured_output.warm_up()
            self._check_integrity_until_message()
        if not self._io.is_stopped:
            for epoch in self._io.pop_worker_epochs():
                self._connect_workers(epoch)

    def _schedule(self) -> SchedulerOutput | None:
        """Return the next step to send, or None if there is nothing to send for now."""
        if self._structured_output is not None:
            for request in self._structured_output.pop_unblocked():
                self._scheduler.unblock(request)
        if not self._scheduler.has_work or len(self._in_flight) == self._max_in_flight:
            return None
        if not self._workers.is_ready:
            return None
        connector_wants_step = self._scheduler.kv_transfer.wants_step
        self._scheduler.crash_isolation.isolate_suspect()
        output = self._scheduler.schedule()
        self._io.publish_crash_progress(self._scheduler.crash_isolation.progress())
        if output.has_result:
            self._in_flight.append(output)
        elif not (
            connector_wants_step
            or output.finished_seq_ids
            or output.preempted_seq_ids
            or output.connector_metadata
            or output.free_encoder_mm_hashes
        ):
            assert self._may_wait, "no request can progress"
            return None
        return output

    @property
    def _may_wait(self) -> bool:
        """Whether a result, a KV transfer or a mask is awaited, or there is no work."""
        scheduler, grammars = self._scheduler, self._structured_output
        return bool(
            self._in_flight
            or scheduler.kv_transfer.is_awaited
            or (grammars is not None and grammars.awaiting_mask)
            or not scheduler.has_work
        )

    def _exchange_masks(self) -> None:
        """Start on the grammar masks of the oldest step in flight; send those that are ready.

        The masks of a step depend on all tokens before it, which are known when it is the oldest.
        Rows whose masks are late are taken out of the step, and end after a while.
        """
        if self._structured_output is None:
            return
        if self._in_flight:
            rewound_until_step = self._scheduler.kv_transfer.rewound_until_step
            self._structured_output.request_masks(self._in_flight[0], rewound_until_step)
        masks = self._structured_output.pop_masks()
        if masks is not None and self._in_flight and masks.step == self._in_flight[0].step:
            self._workers.send_masks(masks.message())
            if masks.late:
                self._scheduler.rewind_rows(self._in_flight[0], masks.late)
        if overdue := self._structured_output.pop_overdue():
            self._io.publish(self._scheduler.fail_requests(overdue))

    def _exchange_adapters(self) -> None:
        """Have the workers load and drop adapters; process what they have loaded."""
        if self._adapters is not None and (outputs := self._adapters.exchange()):
            self._io.publish(outputs)

    def _update_and_publish(self, result: ModelRunnerOutput) -> None:
        """Process the result of the oldest step in flight and publish its outputs.

        Raises WorkerFailedError if the result cannot be that of the step.
        """
        if not self._in_flight or result.step != self._in_flight[0].step:
            if result.seq_ids:  # a step without tokens has an empty result, which is not awaited
                raise WorkerFailedError(0, f"answered step {result.step} unasked")
            return
        output = self._in_flight.popleft()
        violations = NO_VIOLATIONS
        try:
            if self._structured_output is not None:
                violations = self._structured_output.find_violations(output, result)
                if violations.before:
                    self._io.publish(self._scheduler.fail_requests(violations.before))
            outputs = self._scheduler.update_from_output(output, result)
        except ImpossibleResultError as error:
            self._io.publish(error.outputs)
            raise WorkerFailedError(0, f"sent an impossible result: {error}") from error
        self._io.publish_step(outputs)
        if violations.after:
            self._io.publish(self._scheduler.fail_requests(violations.after))
        if self._structured_output is not None:
            self._structured_output.end_step(output.constrained_seq_ids)

    def _update_from_connector(self, report: KVConnectorOutput) -> None:
        """Process completed KV transfers; a failed one can end a request."""
        outputs = self._scheduler.update_from_connector(report)
        if outputs or not self._in_flight:  # otherwise the next step publishes the statistics
            self._io.publish(outputs)

    def _connect_workers(self, epoch: int) -> None:
        """Connect the workers that replace others; steps in flight are lost with the old ones."""
        self._in_flight.clear()
        self._workers.connect_workers(epoch)
        if self._structured_output is not None:
            self._structured_output.begin_worker_epoch()
        if self._adapters is not None:
            self._adapters.lose_workers()
        self._io.publish(self._scheduler.begin_worker_epoch(epoch))
        if self._adapters is not None:
            self._io.publish(self._adapters.begin_worker_epoch())

    def _check_integrity_until_message(self) -> None:
        """Check the KV cache, then wait; a message ends both."""
        for _ in self._check_integrity():
            if self._io.receive_messages(0):
                return
        self._io.receive_messages()

    def _check_integrity(self) -> Iterator[None]:
        """Check the bookkeeping of the KV cache, a few milliseconds per iteration.

        Raises IntegrityError for an inconsistency, or for blocks that nothing uses.
        """
        kv_cache = self._kv_cache
        for problems in check_in_slices(kv_cache):
            if problems:
                raise IntegrityError("; ".join(problems))
            yield
        num_lost = (
            kv_cache.num_usable_blocks
            - kv_cache.num_available_blocks
            - kv_cache.transfer_refs.num_blocks
        )
        if num_lost > 0 and not self._scheduler.num_unfinished:
            raise IntegrityError(f"leak: {num_lost} blocks are allocated and unused")


class EngineIO:
    """Waits for messages, processes what supervisor and front ends sent, and publishes outputs.

    It does so also while a step computes. is_stopped: whether the supervisor has sent `Shutdown`.
    poller: polls all channels of the engine; those of the front ends are added here.
    """

    def __init__(
        self,
        supervisor_io: SupervisorIO,
        front_ends: FrontEndLinks,
        poller: Poller,
        scheduler: Scheduler,
        input_processor: InputProcessor,
        output_dispatcher: OutputDispatcher,
        structured_output: StructuredOutputManager | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._adapters = adapters
        self._supervisor_io = supervisor_io
        self._front_ends = front_ends
        self._poller = poller
        self._scheduler = scheduler
        self._input_processor = input_processor
        self._output_dispatcher = output_dispatcher
        self._live_view = output_dispatcher.live_view
        self._structured_output = structured_output
        self._connector = scheduler.kv_transfer.connector
        self._reported_pause = scheduler.pause_mode
        for link in front_ends.links:
            poller.add(link)
        if structured_output is not None:
            poller.add(structured_output.descriptor)
        if self._connector.fileno() != NO_DESCRIPTOR:
            poller.add(self._connector.fileno())

    @property
    def is_stopped(self) -> bool:
        return self._supervisor_io.is_stopped

    def pop_worker_epochs(self) -> list[int]:
        """Return the epochs of new workers, of which only the last is alive; empties the list."""
        return self._supervisor_io.pop_worker_epochs()

    def receive_messages(self, timeout_seconds: float | None = None) -> bool:
        """Wait for a message on any channel, and process those of supervisor and front ends.

        Returns early if a live view is due, if masks are late, or if a request, a session or
        retained KV expires, and ends what has expired. Returns False if nothing happened within the
        time.
        """
        self._live_view.send_if_due()  # here it delays no step while the workers compute
        ready = self._wait(self._time_until_next_event(timeout_seconds))
        received = self._front_ends.receive()
        for front_end, message in received:
            self._input_processor.process_message(front_end, message)
        expired = self._end_expired()
        compiled = self._accept_compiled_grammars(ready)
        if self._connector.fileno() in ready:
            self._connector.process_notifications()
        if received or expired or compiled:
            self._report_pause()  # before a reply tells a client that the engine is paused
            self._output_dispatcher.flush()
        self._drop_stalled_front_ends()
        return bool(ready or received or expired) or self._live_view.seconds_to_next is not None

    def publish_step(self, outputs: OutputsByFrontEnd) -> None:
        """Send the outputs of a completed step to the front ends, and a heartbeat."""
        self._supervisor_io.send_heartbeat(self._scheduler.worker_epoch, self._scheduler.step)
        self.publish(outputs)

    def publish(self, outputs: OutputsByFrontEnd) -> None:
        """Send outputs to the front ends, with statistics."""
        self._output_dispatcher.add_outputs(outputs)
        self._output_dispatcher.flush()
        self._drop_stalled_front_ends()

    def answer_profile_call(self) -> None:
        """Send the reply to a profile call if all workers have answered."""
        if self._input_processor.answer_profile_call():
            self._output_dispatcher.flush()

    def publish_crash_progress(self, progress: list[tuple[Request, int]]) -> None:
        """Send progress, by which front ends count crashes, before a step can crash.

        progress: requests, and tokens of theirs in complete steps.
        """
        if progress:
            self._output_dispatcher.add_progress(progress)
            self._output_dispatcher.flush()

    def _time_until_next_event(self, timeout_seconds: float | None) -> float | None:
        grammars = self._structured_output
        limits = (
            timeout_seconds,
            None if grammars is None else grammars.seconds_to_next_end,
            None if self._adapters is None else self._adapters.seconds_to_next_end,
            self._live_view.seconds_to_next,
            self._scheduler.resumable_sessions.seconds_to_next_end,
            self._scheduler.deadlines.seconds_to_next_end,
            self._scheduler.agent_sessions.seconds_to_next_end,
        )
        return min((limit for limit in limits if limit is not None), default=None)

    def _wait(self, timeout_seconds: float | None) -> list[Link | int]:
        """Return what is readable after at most this time; commands of the supervisor are done.

        A `Ping` of the supervisor does not end the wait.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            ready = self._poller.wait(timeout_seconds)
            supervisor_is_ready = self._supervisor_io.link in ready
            if not supervisor_is_ready or self._carry_out_commands() or len(ready) > 1:
                return ready
            if end is not None:
                timeout_seconds = max(0.0, end - time.monotonic())

    def _carry_out_commands(self) -> bool:
        """Carry out commands of the supervisor. Return whether there were any besides a `Ping`."""
        any_commands = self._supervisor_io.receive_commands()
        for pause in self._supervisor_io.pop_pauses():
            if pause.mode is None:
                self._scheduler.resume()
            else:
                self._scheduler.pause(pause.mode)
            self._reported_pause = pause.mode
        for adapters in self._supervisor_io.pop_adapter_lists():
            if self._adapters is not None:
                self._adapters.adopt_names(adapters.adapters)
                self._adapters.announce_adopted()
        for message in self._supervisor_io.pop_front_ends():
            old, new = self._front_ends.replace(message.index, message.incarnation)
            for link in old:
                self._disconnect(link)
            self._poller.add(new)
            self._abort_front_end(message.index, "died")
            self._output_dispatcher.flush()  # the gauges that the dead front end received are lost
        return any_commands

    def _end_expired(self) -> bool:
        """End requests, sessions and retained KV whose time is up. Return whether any ended."""
        outputs = self._scheduler.resumable_sessions.end_idle_sessions()
        self._output_dispatcher.add_outputs(outputs)
        kv_expired = self._scheduler.agent_sessions.release_expired()
        requests_expired = self._input_processor.end_overdue_requests()
        return bool(outputs) or kv_expired or requests_expired

    def _accept_compiled_grammars(self, ready: list[Link | int]) -> bool:
        """Accept or refuse requests whose grammar has been compiled. Return whether there were any.

        ready: what is readable.
        """
        manager = self._structured_output
        if manager is None or manager.descriptor not in ready:
            return False
        manager.clear_descriptor()
        return self._input_processor.accept_compiled_requests()

    def _report_pause(self) -> None:
        if self._scheduler.pause_mode != self._reported_pause:
            self._reported_pause = self._scheduler.pause_mode
            self._supervisor_io.report_pause(self._reported_pause)

    def _drop_stalled_front_ends(self) -> None:
        for front_end, link in self._front_ends.pop_stalled():
            self._disconnect(link)
            num_aborted = self._abort_front_end(front_end, "does not read its messages")
            incarnation = self._front_ends.incarnation(front_end)
            self._supervisor_io.report_stalled_front_end(front_end, incarnation, num_aborted)
            self._output_dispatcher.flush()

    def _disconnect(self, link: Link) -> None:
        self._poller.remove(link)
        link.close()

    def _abort_front_end(self, front_end: int, cause: str) -> int:
        """Abort the requests of a front end that is gone. Return their number.

        They have no other line in the log, because the front end writes those. cause: why it is
        gone, as the end of a sentence.
        """
        self._live_view.watch(front_end, wanted=False)
        self._input_processor.forget_front_end(front_end)
        labels = {
            request.request_id: request.label
            for request in self._scheduler.requests
            if request.front_end_index == front_end
        }
        self._scheduler.abort_front_end_requests(front_end)
        ids = " ".join(islice(labels.values(), MAX_LISTED_REQUESTS))
        more = " …" if len(labels) > MAX_LISTED_REQUESTS else ""
        logger.warning(
            "front end %d %s: %d requests are aborted%s",
            *(front_end, cause, len(labels), f": {ids}{more}" if labels else ""),
            extra={FIELDS: {"front_end": front_end, "aborted": len(labels), "ids": ids}},
        )
        return len(labels)
