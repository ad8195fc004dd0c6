"""How much each tenant has been served.

Owns a counter for each tenant and which requests compute their prompts. It decides
nothing: queue, policy and courtesy compare the counters.

The counters are those of the virtual token counter (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024): input tokens when a request is admitted for the first
time, and OUTPUT_WEIGHT for each step of a request that decodes. What a
preemption or a crash makes the engine compute again is charged to nobody. So a counter
moves only where something is done for good, and comparing them cannot go on for ever.

Who asked for nothing has no claim on all that others were given meanwhile: when it begins
to wait again it is lifted to a bounded distance behind them.

    counter ──────────┬──────────────────────┬───▶
              clock - credit               clock   at least what was served to anyone who runs
"""

import math
from typing import Final

from engine_core.request import Request

OUTPUT_WEIGHT: Final = 2
"""An output token costs as much as so many input tokens; the paper's experiments say two."""
MAX_DEBTS: Final = 1024
"""So many tenants that are not here are remembered."""


class _Account:
    """served: in input tokens, up to the step `since`; each decoding request adds to it."""

    __slots__ = ("num_decoding", "num_running", "num_unfinished", "served", "since")

    def __init__(self, served: float, step: int) -> None:
        self.served = served
        self.since = step
        self.num_unfinished = 0
        self.num_running = 0
        self.num_decoding = 0

    def served_by(self, step: int) -> float:
        return self.served + OUTPUT_WEIGHT * self.num_decoding * (step - self.since)

    def settle(self, step: int) -> None:
        """To be called before num_decoding changes."""
        self.served = self.served_by(step)
        self.since = step


class TenantUsage:
    """Counters by tenant. Between two changes nothing is done for a request that decodes.

    credit: tokens, the distance behind the others that a tenant keeps while it is away. With
    the length of the longest request, one of any length has its turn before all others.
    prefills: running requests, by seq_id, that have more than one token to compute, in the
    order in which they were admitted; read only.

    The clock never goes back, and what is admitted beside others moves it as well, by the
    share of each: so new tenants, however many come, are at some time behind each that waits.
    """

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._clock = 0.0
        self._step = 0
        self._accounts: dict[int, _Account] = {}
        self._running: dict[int, _Account] = {}
        self._debts: dict[int, float] = {}
        self.prefills: dict[int, Request] = {}
        self._decoding: set[int] = set()

    @property
    def num_tenants(self) -> int:
        """Those with requests that are not over."""
        return len(self._accounts)

    def served(self, tenant: int) -> float:
        """Weighted tokens; says something only beside that of another tenant. It never falls."""
        return self._accounts[tenant].served_by(self._step)

    def most_served(self) -> float:
        """Of the tenants of which a request runs; minus infinity where none does."""
        step = self._step
        return max((each.served_by(step) for each in self._running.values()), default=-math.inf)

    def begin_step(self) -> None:
        """A step is about to be planned: whose prompt is computed begins to decode."""
        self._step += 1
        if self.prefills:
            for request in list(self.prefills.values()):
                if request.num_computed_tokens + 1 >= request.num_tokens:
                    del self.prefills[request.seq_id]
                    self._decode(request)

    def enter(self, request: Request) -> None:
        """A request that was not here before."""
        account = self._accounts.get(request.tenant)
        if account is None:
            served = self._debts.pop(request.tenant, self._clock - self._credit)
            account = self._accounts[request.tenant] = _Account(served, self._step)
        account.num_unfinished += 1

    def line_up(self, tenant: int) -> None:
        """A tenant of which nothing waited begins to wait."""
        account = self._accounts[tenant]
        account.settle(self._step)
        self._clock = max(self._clock, self.most_served())
        account.served = max(account.served, self._clock - self._credit)

    def admit(self, request: Request, num_new_tokens: int) -> None:
        """A request begins to run; its num_computed_tokens are those it did not have to compute."""
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
            self._decode(request)

    def stop(self, request: Request) -> None:
        """A request does not run any more."""
        account = self._accounts[request.tenant]
        if request.seq_id in self._decoding:
            self._decoding.remove(request.seq_id)
            account.settle(self._step)
            account.num_decoding -= 1
        else:
            del self.prefills[request.seq_id]
        account.num_running -= 1
        if not account.num_running:
            del self._running[request.tenant]
        self._clock = max(self._clock, account.served)

    def runs(self, request: Request) -> bool:
        """It was admitted and has not stopped since."""
        return request.seq_id in self._decoding or request.seq_id in self.prefills

    def leave(self, request: Request) -> None:
        """A request is over, wherever it was."""
        if self.runs(request):
            self.stop(request)
        account = self._accounts[request.tenant]
        account.num_unfinished -= 1
        if not account.num_unfinished:
            del self._accounts[request.tenant]
            self._remember(request.tenant, account.served)

    def _decode(self, request: Request) -> None:
        account = self._accounts[request.tenant]
        account.settle(self._step)
        account.num_decoding += 1
        self._decoding.add(request.seq_id)

    def _remember(self, tenant: int, served: float) -> None:
        """Who is no more than the credit behind comes back as a new one would."""
        floor = self._clock - self._credit
        if served > floor:
            self._debts[tenant] = served
        while self._debts:
            oldest = next(iter(self._debts))
            if self._debts[oldest] > floor and len(self._debts) <= MAX_DEBTS:
                break
            del self._debts[oldest]
