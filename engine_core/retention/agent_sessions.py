"""Sessions of agents: the turns of each, and the tool that it waits for between two turns.

    arrives ─▶ … ─▶ turn ends ─▶ TurnEnded: its tool is known ─▶ arrives ─▶ … ─▶ last turn ends
                        └────────── the tool's duration ────────────┘

Durations run from the end of a turn to the next arrival, by the scheduler's monotonic clock. A
bounded number of jobs is remembered: one that does not come back, or is one too many, counts as
a duration without end.

The KV of a job that is over is overwritten before any other, but for what others have found too,
and for that of the prompt it began with: others often begin with the same.

Owns the sessions and decides when their KV is retained. `RetainedPrefixes` keeps it for as long as
the `TTLRule` says; with `NoRetention` nothing is kept, and sessions are counted all the same.
"""

import math
from collections.abc import Callable
from typing import Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.retention.retained_prefixes import RetainedPrefixes
from engine_core.retention.ttl_rule import PROVISIONAL_SECONDS, TTLRule, by_client

MAX_JOBS: Final = 16_384
"""That are remembered, but for those of which something is here."""
FORGET_SECONDS: Final = 3600.0
"""A job that was away for so long has not come back."""


class Job:
    """One agent's work.

    arrival: seconds, of its first turn; seen: when something of it was here last, counted only
    while nothing is. request_id: of its last turn; num_here: choices that have not ended; waiting:
    by seq_id, those of them that have not run. first_block: hash of what its turns begin with;
    num_first_tokens: of the prompt of the first one that began so, and num_own_tokens: of the
    longest one since then, with its answer: a longer hit was computed by other sessions.
    ended: when the last turn was over; None while it is not. tool: what it waits for, or None
    while nobody has said so. was_last: that turn was to be the last. waited: what it waited after
    turn `waited_after`, where the next one came sooner than news of the tool; None otherwise.
    """

    __slots__ = (
        "arrival",
        "ended",
        "first_block",
        "num_first_tokens",
        "num_here",
        "num_own_tokens",
        "num_turns",
        "request_id",
        "seen",
        "tool",
        "waited",
        "waited_after",
        "waiting",
        "was_last",
    )

    def __init__(self, arrival: float) -> None:
        self.arrival = self.seen = arrival
        self.first_block: bytes | None = None
        self.num_first_tokens = self.num_own_tokens = 0
        self.request_id = self.waited_after = -1
        self.num_turns = 0
        self.num_here = 0
        self.waiting: dict[int, Request] = {}
        self.ended: float | None = None
        self.tool: str | None = None
        self.waited: float | None = None
        self.was_last = False


class AgentSessions:
    """Agents' sessions by the name of their job. A listener."""

    def __init__(
        self,
        pins: RetainedPrefixes,
        rule: TTLRule,
        kv_cache: KVCacheManager,
        clock: Callable[[], float],
        *,
        retires: bool,
    ) -> None:
        self._retained_prefixes = pins
        self._rule = rule
        self._kv_cache = kv_cache
        self._retires = retires
        self._spent: dict[int, list[int]] = {}  # by seq_id
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._job_seconds: list[float] = []
        self._tool_seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def enter(self, request: Request) -> None:
        """A request is about to be queued."""
        name = request.agent.job
        if not name:
            return
        now = self._clock()
        self._retained_prefixes.sweep(now)
        job = self._jobs.pop(name, None) or Job(request.arrival_time)
        self._jobs[name] = job
        job.num_here += 1
        job.waiting[request.seq_id] = request
        if job.request_id != request.request_id:
            self._begin_turn(job, request, now)
            self._forget_old(now)
        request.job_arrival = job.arrival
        request.continues_job = job.num_turns > 1 and not request.agent.is_last_step
        pin = self._retained_prefixes.of(name)
        if pin is not None:
            request.finds_retained_prefix = True
            self._retained_prefixes.wait_for_turn(pin)

    def update_leads(self) -> list[Request]:
        """Turns that wait and whose session has got or lost its retained prefix meanwhile.

        To be called before a step; the caller moves these turns to their new place in the queue.
        """
        moved = []
        for name in self._retained_prefixes.pop_changed():
            job = self._jobs.get(name)
            if job is None or not job.waiting:
                continue
            finds = self._retained_prefixes.of(name) is not None
            for request in job.waiting.values():
                if request.finds_retained_prefix != finds:
                    request.finds_retained_prefix = finds
                    moved.append(request)
        return moved

    def end_turn(self, request_id: int, name: str, tool: str) -> None:
        """The answer of a turn was read: its job waits for this tool."""
        job = self._jobs.get(name)
        if job is None:
            return
        if job.waited is not None and job.waited_after == request_id:
            self._rule.observe(tool, job.waited)
            job.waited = None
        elif job.request_id == request_id and job.ended is not None and job.tool is None:
            job.tool = tool
            self._settle_pin(request_id, name, tool)

    def finish(self, request: Request, *, well: bool) -> None:
        """A request is over and still has its blocks; well: its next turn can build on it."""
        name = request.agent.job
        if not name or not well or request.request_id != self._jobs[name].request_id:
            return
        job, now = self._jobs[name], self._clock()
        job.num_own_tokens = max(job.num_own_tokens, request.num_tokens)
        job.ended = now
        job.was_last = request.agent.is_last_step
        if job.was_last:
            self._retained_prefixes.drop(name, "last step")
            if self._retires:
                blocks = self._kv_cache.findable_blocks(request, job.num_first_tokens)
                self._spent[request.seq_id] = blocks
        else:
            self._pin(request, now)

    @property
    def seconds_to_next_end(self) -> float | None:
        """Until the time of a pin is over; None for never."""
        deadline = self._retained_prefixes.next_deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def end_overdue(self) -> bool:
        """Give up the pins whose time is over, also while no step does; False if none was."""
        num_pins = len(self._retained_prefixes)
        self._retained_prefixes.sweep(self._clock())
        return len(self._retained_prefixes) < num_pins

    def disown(self, request: Request) -> None:
        """What a turn has computed cannot be found any more: nothing is gained by keeping it."""
        pin = self._retained_prefixes.of(request.agent.job) if request.agent.job else None
        if pin is not None and pin.request_id == request.request_id:
            self._retained_prefixes.drop(pin.job, "corrupt")

    def take_seconds(self) -> tuple[list[float], list[float]]:
        """Of jobs that are over, and of tools, since the last call."""
        jobs, self._job_seconds = self._job_seconds, []
        tools, self._tool_seconds = self._tool_seconds, []
        return jobs, tools

    # As a listener

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        if self._retires and not request.num_preemptions:
            self._see_found(request)
        if not request.agent.job:
            return
        self._jobs[request.agent.job].waiting.pop(request.seq_id, None)
        pin = self._retained_prefixes.of(request.agent.job)
        if pin is not None and pin.request_id != request.request_id:
            self._retained_prefixes.use(pin, found=request.num_cached_tokens > 0)
        elif (
            request.continues_job
            and not request.finds_retained_prefix
            and not request.num_preemptions
        ):
            assert request.queued_at is not None
            self._rule.learn_delay(self._clock() - request.queued_at)

    def on_released(self, request: Request) -> None:
        name = request.agent.job
        if not name:
            return
        self._jobs[name].waiting.pop(request.seq_id, None)
        if request.seq_id in self._spent:  # it has given back its blocks by now
            self._kv_cache.pool.evict_first(self._spent.pop(request.seq_id))
        job, now = self._jobs[name], self._clock()
        job.num_here -= 1
        if not job.num_here:
            if job.was_last:
                self._end(name, job)
                return
            job.seen = now
            self._jobs[name] = self._jobs.pop(name)
        pin = self._retained_prefixes.of(name)
        if pin is not None and pin.is_awaited and not job.waiting:
            self._retained_prefixes.wait_no_more(pin, now + PROVISIONAL_SECONDS)

    # Parts of the above

    def _see_found(self, request: Request) -> None:
        """Whether what it found is of others; from now on its prompt is its job's own."""
        job = self._jobs.get(request.agent.job)
        if request.num_cached_tokens > (job.num_own_tokens if job is not None else 0):
            self._kv_cache.mark_shared_prefix(request)
        if job is not None:
            job.num_own_tokens = max(job.num_own_tokens, request.num_tokens)

    def _begin_turn(self, job: Job, request: Request, now: float) -> None:
        before, job.request_id = job.request_id, request.request_id
        first_block = request.block_hashes[0] if request.block_hashes else b""
        if first_block != job.first_block:
            job.first_block = first_block
            job.num_first_tokens = request.num_prompt_tokens
            job.num_own_tokens = 0
        job.num_turns += 1
        job.waited = None
        job.was_last = False
        if job.ended is not None:
            seconds = now - job.ended
            self._tool_seconds.append(seconds)
            if job.tool is not None:
                self._rule.observe(job.tool, seconds)
            else:
                job.waited, job.waited_after = seconds, before
        job.ended = job.tool = None

    def _settle_pin(self, request_id: int, name: str, tool: str) -> None:
        pin = self._retained_prefixes.of(name)
        if pin is None or pin.request_id != request_id or pin.is_awaited:
            return
        worth = self._rule.decide(tool, pin.num_tokens)
        if pin.by_client:
            self._retained_prefixes.set_value(pin, worth.gain)
        else:
            self._retained_prefixes.grant(pin, worth.seconds, worth.gain, self._clock())

    def _pin(self, request: Request, now: float) -> None:
        worth = self._rule.provisional(request.num_tokens)
        wanted = by_client(request.agent.ttl_ms)
        seconds = worth.seconds if wanted is None else wanted
        if not worth.seconds or not seconds:
            self._retained_prefixes.drop(request.agent.job, "newer turn")
            return
        blocks = self._kv_cache.findable_blocks(request)
        self._retained_prefixes.take(
            request, blocks, seconds, worth.gain, now, by_client=wanted is not None
        )

    def _end(self, name: str, job: Job) -> None:
        """A job has had its last turn."""
        assert job.ended is not None
        self._job_seconds.append(job.ended - job.arrival)
        self._rule.learn_turns(job.num_turns)
        del self._jobs[name]

    def _forget_old(self, now: float) -> None:
        """The one that nothing was heard of for longest, where it is too long or one too many."""
        name, job = next(iter(self._jobs.items()))
        if job.num_here:
            if len(self._jobs) > MAX_JOBS:  # it is heard of again when what is here is over
                self._jobs[name] = self._jobs.pop(name)
            return
        if len(self._jobs) <= MAX_JOBS and now - job.seen < FORGET_SECONDS:
            return
        self._retained_prefixes.drop(name, "forgotten")
        if job.ended is not None:
            self._rule.observe(job.tool or "", math.inf)
        self._rule.learn_turns(job.num_turns)
        del self._jobs[name]
