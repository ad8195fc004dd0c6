"""What a scheduling policy from outside extends: an interpreted class, unlike the queues here."""

from abc import ABC, abstractmethod
from typing import Any

from engine_core.request import Request


class SchedulingPolicy(ABC):
    """The order of waiting requests of one tenant, and of preemption, by keys that are compared.

    One object for all tenants, constructed without arguments. Among equal keys the request that
    came first is first. A key is asked for once each time, and must not change afterwards.
    """

    @abstractmethod
    def waiting_key(self, request: Request) -> Any:
        """Return the key of a new request; the lowest is admitted first."""

    def preempted_key(self, request: Request) -> Any:
        """Return the key of a request that lost its blocks, among the same ones."""
        return self.waiting_key(request)

    @abstractmethod
    def preemption_key(self, request: Request) -> Any:
        """Return the key of a running request; the lowest is preempted first."""

    def priority_key(self, request: Request) -> int:
        """Return what counts before fairness among tenants; the lower is admitted first."""
        return 0
