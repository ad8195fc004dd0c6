"""Scheduling policies by the name that `--scheduling-policy` gives them."""

from collections.abc import Callable
from typing import Final

from engine_core.scheduler.queues.base import SchedulingPolicy
from engine_core.scheduler.queues.continuum import ByJobs
from engine_core.scheduler.queues.fair import FairShares
from engine_core.scheduler.queues.fcfs import FirstComeFirstServed
from engine_core.scheduler.queues.priority import ByPriority
from engine_core.scheduler.tenant_usage import TenantUsage

POLICIES: Final[dict[str, Callable[[], SchedulingPolicy]]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
    "continuum": ByJobs,
}
"""A new policy also needs its name in `proto.config.SchedulerConfig.scheduling_policy`."""


def make_policy(name: str, usage: TenantUsage) -> FairShares:
    """The policy of this name for each tenant's requests, and fairness among tenants."""
    return FairShares(POLICIES[name](), usage)
