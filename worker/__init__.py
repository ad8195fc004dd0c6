"""The process that computes: one per device.

Owns weights, KV tensors and one row of state per running sequence. Knows nothing
of queues, budgets or HTTP: it computes what a SchedulerOutput lists.
"""

import proto.runtime.host_resources  # noqa: F401  torch, which comes next, brings OpenMP, which binds this thread
