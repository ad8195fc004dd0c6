"""The loop of the engine: schedule, send, wait, update, answer.

Owns the order of these, and the steps that the workers have not answered yet.

    one in flight     schedule 1 ─▶ compute 1 ─▶ update 1, schedule 2 ─▶ compute 2 ─▶ …
    two in flight     schedule 1, 2 ─▶ compute 1 ─▶ compute 2 ─▶ compute 3 ─▶ …
                                              └ update 1, schedule 3 ┘
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from engine_core.executor.base import WorkerFailedError
from engine_core.executor.crew import Crew
from engine_core.scheduler.result import ImpossibleResultError
from engine_core.scheduler.scheduler import Scheduler
from engine_core.service import Service
from engine_core.structured_output.grammars import NO_GRAMMARS, EarlyAnswerError, Grammars
from proto.kv_transfer import KVConnectorOutput
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput

IDLE_SECONDS: Final = 1.0
"""Without any message for so long, the engine has time for its integrity check."""

SYNCHRONOUS: Final = 1
"""Steps in flight: the next is scheduled when the tokens of the last are known."""
OVERLAPPED: Final = 2
"""Steps in flight: the next is scheduled, and waits at the workers, while one computes."""


class Stepper:
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
        crew: Crew,
        service: Service,
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
        self._crew.hire(epoch)
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
