"""The loop of the engine: schedule, send, wait, update, answer.

Owns the order of these; everything else is a call.
"""

from collections.abc import Callable

from engine_core.executor.base import Executor, WorkerFailedError
from engine_core.scheduler.scheduler import Scheduler
from engine_core.service import Service
from proto.errors import ProtocolError
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput

IDLE_SECONDS = 1.0
"""Without any message for so long, the engine has time for its integrity check."""


class SynchronousStepper:
    """One step at a time: the next is scheduled when the tokens of the last are known.

    check_when_idle: raises when the books of the engine do not add up; called when
    a second has gone by without work or messages.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        service: Service,
        check_when_idle: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._service = service
        self._check_when_idle = check_when_idle

    def run(self) -> None:
        """Step while there is work, sleep while there is none, until told to stop."""
        while True:
            if self._scheduler.has_work:
                self._service.serve(0)
            else:
                self._idle()
            if self._service.stopped:
                return
            if self._scheduler.has_work:
                self._step()

    def _step(self) -> None:
        output = self._scheduler.schedule()
        self._executor.submit(output)
        if output.total_num_scheduled_tokens == 0:
            assert not self._scheduler.has_work, "no request can progress"
            return
        result = self._result_of(output)
        if result is None:
            return
        try:
            outputs = self._scheduler.update_from_output(output, result)
        except ProtocolError as error:
            raise WorkerFailedError(f"worker 0 sent an impossible result: {error}") from error
        self._service.publish(outputs)

    def _result_of(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """The answer to a step; None when the engine has to stop before it comes.

        Front ends are served meanwhile, so aborts count before the tokens do.
        """
        while True:
            self._service.serve()
            if self._service.stopped:
                return None
            for result in self._executor.receive():
                if result.step == output.step:
                    return result
                self._ignore_empty(result)

    def _idle(self) -> None:
        if not self._service.serve(IDLE_SECONDS):
            self._check_when_idle()
            self._service.serve()
        for result in self._executor.receive():
            self._ignore_empty(result)

    def _ignore_empty(self, result: ModelRunnerOutput) -> None:
        """Answers to steps that only carried finished handles say nothing."""
        if result.handles:
            raise WorkerFailedError(f"worker 0 answered step {result.step} unasked")
