"""Scheduling policies: who is admitted first, and who gives way first.

A policy owns no request. It names the queue for those that wait and picks the
victim among those that run.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final, Literal, Protocol

from engine_core.queues.base import RequestQueue
from engine_core.queues.fcfs import FCFSQueue
from engine_core.queues.priority import PriorityQueue
from engine_core.request import Request

PolicyName = Literal["fcfs", "priority"]

_order: Final = attrgetter("order")


class SchedulingPolicy(Protocol):
    """One answer to the two questions of order."""

    def make_queue(self) -> RequestQueue:
        """An empty queue for waiting requests."""
        ...

    def victim(self, running: Sequence[Request]) -> int:
        """Index of the running request that gives way; `running` is in order of admission."""
        ...


class FirstComeFirstServed:
    """The request admitted last gives way, so that in one step no victim has been planned."""

    def make_queue(self) -> RequestQueue:
        return FCFSQueue()

    def victim(self, running: Sequence[Request]) -> int:
        return len(running) - 1


class ByPriority:
    """The request that would be admitted last gives way, wherever it stands."""

    def make_queue(self) -> RequestQueue:
        return PriorityQueue()

    def victim(self, running: Sequence[Request]) -> int:
        return running.index(max(running, key=_order))


def policy_of(name: PolicyName) -> SchedulingPolicy:
    """The policy of `--scheduling-policy`."""
    return ByPriority() if name == "priority" else FirstComeFirstServed()
