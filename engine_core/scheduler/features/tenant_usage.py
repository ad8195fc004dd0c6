"""How much each tenant has been served: counters that queue, policy and fairness compare.

The counters are those of the virtual token counter (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024): input tokens when a request is admitted for the first time, and
OUTPUT_WEIGHT for each output token: one for each step of a decoding request, and those that a step
yields in addition when its result arrives. An image costs the input tokens that could have been
computed while it was encoded, in addition to its own. Recomputation after a preemption or a crash
is charged to no tenant. So a counter moves only with work that is never undone, and two tenants
cannot preempt each other for ever.

A tenant that was absent gets no credit for all that others were served meanwhile: when it begins to
wait again, its counter is raised to a bounded distance behind them.

    counter ──────────┬──────────────────────┬───▶
              clock - credit               clock   at least what any running tenant was served
"""

import math
from typing import Final

from engine_core.request import Request

OUTPUT_WEIGHT: Final = 2
"""Cost of an output token in input tokens; two in the paper's experiments."""
MAX_ABSENT_TENANTS: Final = 1024
"""Maximum number of tenants without requests whose counters are remembered."""


class _Account:
    """The counter of a tenant: served, in input tokens, up to the step `since`."""

    __slots__ = ("num_decoding", "num_running", "num_unfinished", "served", "since")

    def __init__(self, served: float, step: int) -> None:
        self.served = served
        self.since = step
        self.num_unfinished = 0
        self.num_running = 0
        self.num_decoding = 0

    def served_by(self, step: int) -> float:
        return self.served + OUTPUT_WEIGHT * self.num_decoding * (step - self.since)

    def charge_until(self, step: int) -> None:
        """Charge the decodes up to a step; called before num_decoding changes."""
        self.served = self.served_by(step)
        self.since = step


class TenantUsage:
    """Counters by tenant. A decoding request costs no update per step.

    credit: tokens by which a tenant may be behind the others after an absence. With the length of
    the longest request, a returning tenant's first request of any length goes first.
    prefills: running requests, by seq_id, with more than one token to compute, in the order of
    admission; other parts only read it.

    The clock never goes back. Requests that are admitted while other tenants have some move it too,
    by the share of each, so that even with ever more new tenants each waiting tenant comes first at
    some time.
    """

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._clock = 0.0
        self._step = 0
        self._accounts: dict[int, _Account] = {}
        self._running: dict[int, _Account] = {}
        self._absent: dict[int, float] = {}
        self.prefills: dict[int, Request] = {}
        self._decoding: set[int] = set()

    @property
    def num_tenants(self) -> int:
        """Number of tenants with unfinished requests."""
        return len(self._accounts)

    def served(self, tenant: int) -> float:
        """Return weighted tokens, to be compared with those of other tenants. They never fall."""
        return self._accounts[tenant].served_by(self._step)

    def most_served(self) -> float:
        """Return the maximum over tenants with running requests; minus infinity without any."""
        step = self._step
        return max(
            (account.served_by(step) for account in self._running.values()), default=-math.inf
        )

    def begin_step(self) -> None:
        """Count a step; requests whose prompt is computed begin to decode."""
        self._step += 1
        if self.prefills:
            for request in list(self.prefills.values()):
                if not request.is_prefilling:
                    del self.prefills[request.seq_id]
                    self._begin_decoding(request)

    def register_request(self, request: Request) -> None:
        account = self._accounts.get(request.tenant)
        if account is None:
            served = self._absent.pop(request.tenant, self._clock - self._credit)
            account = self._accounts[request.tenant] = _Account(served, self._step)
        account.num_unfinished += 1

    def begin_waiting(self, tenant: int) -> None:
        """Raise the counter of a tenant that had no ready request and gets one."""
        account = self._accounts[tenant]
        account.charge_until(self._step)
        self._clock = max(self._clock, self.most_served())
        account.served = max(account.served, self._clock - self._credit)

    def begin_running(self, request: Request, num_new_tokens: int) -> None:
        """Charge an admitted request for the tokens that it has to compute."""
        account = self._running[request.tenant] = self._accounts[request.tenant]
        account.num_running += 1
        num_missing = request.num_tokens - request.num_computed_tokens
        if not request.num_preemptions:
            account.served += num_missing
            if len(self._accounts) > 1:
                self._clock += num_missing / len(self._accounts)
        if num_new_tokens < num_missing:
            self.prefills[request.seq_id] = request
        else:
            self._begin_decoding(request)

    def charge_extra_tokens(self, request: Request, number: int) -> None:
        """Charge output tokens of a step beyond the first, from accepted drafts."""
        self._accounts[request.tenant].served += OUTPUT_WEIGHT * number

    def charge_tenant(self, tenant: int, num_tokens: float) -> None:
        """Charge input tokens to a tenant, whose request may have ended."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.served += num_tokens
        else:
            served = self._absent.pop(tenant, self._clock - self._credit)
            self._remember_absent(tenant, served + num_tokens)

    def end_running(self, request: Request) -> None:
        """Stop charging for a request that does not run any more."""
        account = self._accounts[request.tenant]
        if request.seq_id in self._decoding:
            self._decoding.remove(request.seq_id)
            account.charge_until(self._step)
            account.num_decoding -= 1
        else:
            del self.prefills[request.seq_id]
        account.num_running -= 1
        if not account.num_running:
            del self._running[request.tenant]
        self._clock = max(self._clock, account.served)

    def is_running(self, request: Request) -> bool:
        """Return whether a request is charged for."""
        return request.seq_id in self._decoding or request.seq_id in self.prefills

    def unregister_request(self, request: Request) -> None:
        if self.is_running(request):
            self.end_running(request)
        account = self._accounts[request.tenant]
        account.num_unfinished -= 1
        if not account.num_unfinished:
            del self._accounts[request.tenant]
            self._remember_absent(request.tenant, account.served)

    def _begin_decoding(self, request: Request) -> None:
        account = self._accounts[request.tenant]
        account.charge_until(self._step)
        account.num_decoding += 1
        self._decoding.add(request.seq_id)

    def _remember_absent(self, tenant: int, served: float) -> None:
        """Remember the counter of a tenant that leaves, if it is above that of a new tenant."""
        floor = self._clock - self._credit
        if served > floor:
            self._absent[tenant] = served
        while self._absent:
            oldest = next(iter(self._absent))
            if self._absent[oldest] > floor and len(self._absent) <= MAX_ABSENT_TENANTS:
                break
            del self._absent[oldest]
