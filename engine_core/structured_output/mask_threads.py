"""Computes grammar masks in threads, so that a slow grammar delays only its own rows.

    submit ─▶ quick lane ─▶ 2 to 8 threads ─▶ event_fd ─▶ pop_done
                 └ grammar is slow ─▶ slow lane ─▶ 1 to 4 threads ─┘

A thread takes one row at a time. In each lane tenants take turns, and so do the grammars of a
tenant: a tenant with one row waits for one row of each other tenant at most. One thread at a time
uses a grammar, whose matchers share a lexer. The masks of a slow grammar
(`matchers.py:GrammarCost`) are computed in the slow lane only.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.compiler import start_thread
from engine_core.structured_output.matchers import FREE_SECONDS, GrammarCost, MaskRow, Matcher
from proto.runtime.sockets import EventFd

logger = logging.getLogger("tokend.grammars")

UNUSABLE: Final = "the grammar cannot be used"


@dataclass(slots=True, eq=False)
class MaskTask:
    """The masks of a row to compute: of its next position, and of each position after a draft.

    tenant: whose turn it takes. cost: of its grammar. token_ids: tokens that its matcher has not
    consumed. draft: tokens after them. masks: the result; for each position the mask, and a
    message for the client if the text cannot continue there.
    """

    seq_id: int
    tenant: int
    matcher: Matcher
    cost: GrammarCost
    token_ids: list[int]
    draft: list[int]
    masks: list[tuple[MaskRow, str]] = field(default_factory=list)

    def compute(self, backend: LLGuidanceBackend) -> None:
        """Advance the matcher, then fill the masks; the tokens of a draft are read by copies."""
        started = time.thread_time()
        matchers = [self.matcher]
        self.matcher.consume(self.token_ids)
        for token_id in self.draft:
            matchers.append(matchers[-1].copy())
            matchers[-1].consume([token_id])
        masks = backend.empty_masks(len(matchers))
        backend.fill_masks(matchers, masks)
        self.masks = [(mask, matcher.error) for mask, matcher in zip(masks, matchers, strict=True)]
        seconds = time.thread_time() - started
        self.cost.step_seconds += seconds
        self.cost.add(seconds - FREE_SECONDS * len(matchers))

    def fail(self, backend: LLGuidanceBackend) -> None:
        """End the row: its masks could not be computed."""
        masks = backend.empty_masks(1 + len(self.draft))
        masks[:] = -1
        self.masks = [(mask, UNUSABLE) for mask in masks]


class _Lane:
    """Tasks that wait, by tenant and grammar; those whose turn is next come first."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, OrderedDict[GrammarCost, deque[MaskTask]]] = OrderedDict()

    def put(self, tasks: Iterable[MaskTask]) -> None:
        for task in tasks:
            grammars = self._waiting.setdefault(task.tenant, OrderedDict())
            grammars.setdefault(task.cost, deque()).append(task)

    def pop(self, busy: Collection[GrammarCost]) -> MaskTask | None:
        """Return a task of the next tenant and grammar that no thread uses; None for none."""
        for tenant, grammars in self._waiting.items():
            for cost, tasks in grammars.items():
                if cost not in busy:
                    self._waiting.move_to_end(tenant)
                    grammars.move_to_end(cost)
                    task = tasks[0]
                    self.remove(task)
                    return task
        return None

    def pop_all(self, cost: GrammarCost) -> list[MaskTask]:
        """Return and forget the tasks of a grammar, of all tenants."""
        found = self.tasks_of(cost)
        for task in found:
            self.remove(task)
        return found

    def tasks_of(self, cost: GrammarCost) -> list[MaskTask]:
        return [task for grammars in self._waiting.values() for task in grammars.get(cost, ())]

    def remove(self, task: MaskTask) -> None:
        """Forget a task, if it waits here."""
        grammars = self._waiting.get(task.tenant, OrderedDict())
        tasks = grammars.get(task.cost, deque())
        if task not in tasks:
            return
        tasks.remove(task)
        if not tasks:
            del grammars[task.cost]
        if not grammars:
            del self._waiting[task.tenant]


class MaskThreads:
    """Threads that compute masks; all methods are for the engine's thread.

    backend: returns the backend, which exists once there is a matcher. event_fd: notified when the
    quick lane is empty, and for each task of the slow lane.
    """

    def __init__(
        self, backend: Callable[[], LLGuidanceBackend], event_fd: EventFd, num_threads: int
    ) -> None:
        self._backend = backend
        self._event_fd = event_fd
        self._changed = threading.Condition()
        self._quick, self._slow = _Lane(), _Lane()
        self._running: dict[MaskTask, _Lane] = {}  # tasks that threads compute
        self._awaited: set[MaskTask] = set()  # in the quick lane, and not done
        self._abandoned: set[MaskTask] = set()  # of these, whose thread was replaced
        self._is_closed = False
        self._done: queue.SimpleQueue[MaskTask] = queue.SimpleQueue()
        self._max_abandoned = num_quick = max(2, num_threads)
        self._threads: list[threading.Thread] = []
        for lane in [self._quick] * num_quick + [self._slow] * max(1, num_threads // 2):
            self._start_thread(lane)

    def submit(self, quick: list[MaskTask], slow: list[MaskTask]) -> None:
        """Compute the masks of a step, and those that no step waits for."""
        with self._changed:
            self._awaited.update(quick)
            self._quick.put(quick)
            self._slow.put(slow)
            self._changed.notify_all()

    def stop_waiting(self) -> None:
        """Note that the step goes without the masks that are missing; they are computed later.

        A thread that computes a mask cannot be stopped. Another one takes its place, so that such
        masks do not delay those of the next step.
        """
        with self._changed:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            running = [task for task, lane in self._running.items() if lane is self._quick]
            for task in set(running) - self._abandoned:
                if len(self._abandoned) < self._max_abandoned:
                    self._abandoned.add(task)
                    self._start_thread(self._quick)
            self._awaited.clear()

    def discard(self, task: MaskTask) -> None:
        """Forget a task that no thread has begun."""
        with self._changed:
            for lane in (self._quick, self._slow):
                lane.remove(task)
            self._awaited.discard(task)

    @property
    def is_quick_done(self) -> bool:
        """Whether the rest of the step's tasks is slow; ask before `pop_done`."""
        return not self._awaited

    def pop_done(self) -> list[MaskTask]:
        """Return the tasks that were done since the last call."""
        return [self._done.get() for _ in range(self._done.qsize())]

    def close(self) -> None:
        """End the threads, after the masks that they are computing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_thread(self, lane: _Lane) -> None:
        self._threads.append(start_thread("grammar masks", partial(self._run_thread, lane)))

    def _run_thread(self, lane: _Lane) -> None:
        while (task := self._begin_task(lane)) is not None:
            backend = self._backend()
            with task.cost.lock:
                try:
                    task.compute(backend)
                except Exception:  # a step or a request waits for it
                    logger.exception("a mask could not be computed")
                    task.fail(backend)
            self._done.put(task)
            if self._end_task(lane, task):
                return

    def _begin_task(self, lane: _Lane) -> MaskTask | None:
        """Wait for a task whose grammar no other thread uses; None when the threads end."""
        with self._changed:
            while not self._is_closed:
                task = lane.pop({task.cost for task in self._running})
                if task is None:
                    self._changed.wait()
                elif lane is self._quick and task.cost.is_slow:
                    self._move_to_slow([task, *lane.pop_all(task.cost)])
                else:
                    self._running[task] = lane
                    return task
        return None

    def _end_task(self, lane: _Lane, task: MaskTask) -> bool:
        """Note that a task is done. Return whether its thread was replaced, and ends."""
        with self._changed:
            is_abandoned = task in self._abandoned
            self._abandoned.discard(task)
            del self._running[task]
            other = self._slow if lane is self._quick else self._quick
            if is_abandoned or other.tasks_of(task.cost):
                self._changed.notify_all()  # other threads may use the grammar now
            self._awaited.discard(task)
            is_news = lane is self._slow or not self._awaited
        if is_news:
            self._event_fd.notify()
        return is_abandoned

    def _move_to_slow(self, tasks: list[MaskTask]) -> None:
        self._slow.put(tasks)
        self._awaited.difference_update(tasks)
        self._changed.notify_all()
        if not self._awaited:
            self._event_fd.notify()
