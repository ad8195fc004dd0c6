"""The registry of scheduling policies, by the names of `--scheduling-policy`."""

from collections.abc import Callable
from typing import Final

from engine_core.scheduler.features.tenant_usage import TenantUsage
from engine_core.scheduler.queues.base import SchedulingPolicy
from engine_core.scheduler.queues.continuum import BySession
from engine_core.scheduler.queues.fair import FairSchedulingPolicy
from engine_core.scheduler.queues.fcfs import FirstComeFirstServed
from engine_core.scheduler.queues.priority import ByPriority

POLICIES: Final[dict[str, Callable[[], SchedulingPolicy]]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
    "continuum": BySession,
}
"""A new policy needs its name in `proto.config.SchedulerConfig.scheduling_policy`, too."""


def make_policy(name: str, usage: TenantUsage) -> FairSchedulingPolicy:
    """Return the policy of this name for each tenant's requests, with fairness among tenants."""
    return FairSchedulingPolicy(POLICIES[name](), usage)
