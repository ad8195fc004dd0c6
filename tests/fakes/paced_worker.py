"""A worker with a fixed step time, in a thread."""

import os
import threading
import time
from collections import deque

from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.sockets import Poller
from tests.fakes.engine_process import EngineProcess


class PacedWorker:
    """Answers the steps of an engine after `step_seconds`, while the context is active.

    Meanwhile it owns the worker's end of the link, which EngineProcess reads otherwise.

    had_next: for every step with tokens, whether the next one had arrived before its answer.
    num_preempted: number of preemptions in those steps.
    """

    def __init__(self, engine: EngineProcess, step_seconds: float) -> None:
        self.had_next: list[bool] = []
        self.num_preempted = 0
        self._engine = engine
        self._link = engine.worker
        self._step_seconds = step_seconds
        self._queue: deque[SchedulerOutput] = deque()
        self._end = os.eventfd(0)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "PacedWorker":
        self._queue += self._engine.inbox.pop(self._link)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)
        self._engine.inbox[self._link] = list(self._queue)

    def _run(self) -> None:
        poller = Poller([self._link], [self._end])
        while self._end not in poller.wait(0 if self._queue else None):
            self._queue += self._link.receive()
            if self._queue:
                self._answer(self._queue.popleft())

    def _answer(self, step: SchedulerOutput) -> None:
        result = self._engine.runner.execute(step)
        self.num_preempted += len(step.preempted_seq_ids)
        if step.total_num_scheduled_tokens:
            time.sleep(self._step_seconds)  # the compute time of a device
            self._queue += self._link.receive()
            self.had_next.append(any(each.total_num_scheduled_tokens for each in self._queue))
        self._link.send(result)
