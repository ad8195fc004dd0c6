"""Sessions of agents: the turns of each, and the tool that it waits for between two turns.

    arrival ─▶ … ─▶ turn ends ─▶ TurnEnded: its tool is known ─▶ arrival ─▶ … ─▶ last turn ends
                        └────────── duration of the tool ───────────┘

`AgentSessions` decides when KV is retained after a turn; `RetainedPrefixes` keeps it for as long as
the `TTLRule` says. Without retention the sessions are only counted. A client names a session by its
session id.

Durations run from the end of a turn to the next arrival, by the scheduler's monotonic clock. The
number of remembered sessions is bounded: one that does not return, or exceeds the bound, counts as
an infinite duration.

When a session's last turn has ended, its KV is evicted first, except prefixes shared with other
sessions, and the prompt that it began with, which is often shared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.features.base import SchedulerFeature
from engine_core.scheduler.features.retention.retained_prefixes import RetainedPrefixes
from engine_core.scheduler.features.retention.ttl_rule import (
    PROVISIONAL_SECONDS,
    TTLRule,
    by_client,
)

MAX_SESSIONS: Final = 16_384
"""Maximum number of remembered sessions; sessions with unfinished requests are not forgotten."""
FORGET_SECONDS: Final = 3600.0
"""A session without requests for so long is forgotten."""


@dataclass(slots=True)
class AgentSession:
    """One session of an agent.

    arrival: of its first turn, in seconds. last_seen: when its last request ended; unused while it
    has unfinished ones.
    request_id: of its last turn. num_unfinished: unfinished choices; waiting: by seq_id, those that
    have not run yet. first_block: hash of the first block of its turns; num_first_tokens: prompt
    length of the first turn with it; num_own_tokens: length of the longest turn since, with
    output; a longer hit was computed by other sessions.
    ended: when the last turn ended; None during a turn. tool: the one that it waits for; None while
    unknown. was_last: whether that turn was the last. waited: seconds between turn `waited_after`
    and the next one, if that arrived before the tool was reported; None otherwise.
    """

    arrival: float
    last_seen: float
    first_block: bytes | None = None
    num_first_tokens: int = 0
    num_own_tokens: int = 0
    request_id: int = -1
    num_turns: int = 0
    num_unfinished: int = 0
    waiting: dict[int, Request] = field(default_factory=dict)
    ended: float | None = None
    tool: str | None = None
    was_last: bool = False
    waited: float | None = None
    waited_after: int = -1


class AgentSessions(SchedulerFeature):
    """Agent sessions by the name that their requests carry."""

    def __init__(
        self,
        retained_prefixes: RetainedPrefixes,
        rule: TTLRule,
        kv_cache: KVCacheManager,
        clock: Callable[[], float],
        *,
        evicts_last_turns: bool,
    ) -> None:
        self._retained_prefixes = retained_prefixes
        self._rule = rule
        self._kv_cache = kv_cache
        self._evicts_last_turns = evicts_last_turns
        self._evict_first: dict[int, list[int]] = {}  # blocks of last turns, by seq_id
        self._clock = clock
        self._sessions: dict[str, AgentSession] = {}
        self._session_seconds: list[float] = []
        self._tool_seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def on_request_added(self, request: Request) -> None:
        """Assign a request that is about to be queued to its session."""
        name = request.agent.session
        if not name:
            return
        now = self._clock()
        self._retained_prefixes.release_expired(now)
        arrival = request.arrival_time
        session = self._sessions.pop(name, None) or AgentSession(arrival, last_seen=arrival)
        self._sessions[name] = session
        session.num_unfinished += 1
        session.waiting[request.seq_id] = request
        if session.request_id != request.request_id:
            self._begin_turn(session, request, now)
            self._forget_old(now)
        request.agent_session_arrival = session.arrival
        request.continues_agent_session = session.num_turns > 1 and not request.agent.is_last_step
        prefix = self._retained_prefixes.prefix_of(name)
        if prefix is not None:
            request.finds_retained_prefix = True
            self._retained_prefixes.hold_for_turn(prefix)

    def update_leads(self) -> list[Request]:
        """Return waiting turns whose session has gained or lost its retained prefix.

        Called before each step; the caller moves these turns to their new place in the queue.
        """
        moved = []
        for name in self._retained_prefixes.pop_changed():
            session = self._sessions.get(name)
            if session is None or not session.waiting:
                continue
            finds = self._retained_prefixes.prefix_of(name) is not None
            for request in session.waiting.values():
                if request.finds_retained_prefix != finds:
                    request.finds_retained_prefix = finds
                    moved.append(request)
        return moved

    def report_tool(self, request_id: int, name: str, tool: str) -> None:
        """Note which tool a session waits for after a turn, and retain its prefix accordingly."""
        session = self._sessions.get(name)
        if session is None:
            return
        if session.waited is not None and session.waited_after == request_id:
            self._rule.learn_duration(tool, session.waited)
            session.waited = None
        elif (
            session.request_id == request_id and session.ended is not None and session.tool is None
        ):
            session.tool = tool
            self._set_expiry(request_id, name, tool)

    def on_ending(self, request: Request, *, succeeded: bool) -> None:
        """End a turn; retain its prefix if it succeeded."""
        name = request.agent.session
        if not name or not succeeded or request.request_id != self._sessions[name].request_id:
            return
        session, now = self._sessions[name], self._clock()
        session.num_own_tokens = max(session.num_own_tokens, request.num_tokens)
        session.ended = now
        session.was_last = request.agent.is_last_step
        if session.was_last:
            self._retained_prefixes.release_prefix(name, "last step")
            if self._evicts_last_turns:
                blocks = self._kv_cache.findable_blocks(request, session.num_first_tokens)
                self._evict_first[request.seq_id] = blocks
        else:
            self._retain(request, now)

    @property
    def seconds_to_next_end(self) -> float | None:
        """Seconds until a retained prefix expires; None for never."""
        deadline = self._retained_prefixes.next_deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def release_expired(self) -> bool:
        """Release expired prefixes while no step does; False if there was none."""
        num_before = len(self._retained_prefixes)
        self._retained_prefixes.release_expired(self._clock())
        return len(self._retained_prefixes) < num_before

    def drop_corrupt_prefix(self, request: Request) -> None:
        """Release the prefix of a turn whose KV is not finite, or whose image failed."""
        name = request.agent.session
        prefix = self._retained_prefixes.prefix_of(name) if name else None
        if prefix is not None and prefix.request_id == request.request_id:
            self._retained_prefixes.release_prefix(name, "corrupt")

    def pop_durations(self) -> tuple[list[float], list[float]]:
        """Return the seconds of sessions that have ended, and of tools, since the last call."""
        sessions, self._session_seconds = self._session_seconds, []
        tools, self._tool_seconds = self._tool_seconds, []
        return sessions, tools

    # Beginning and end

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        if self._evicts_last_turns and not request.num_preemptions:
            self._count_own_tokens(request)
        if not request.agent.session:
            return
        self._sessions[request.agent.session].waiting.pop(request.seq_id, None)
        prefix = self._retained_prefixes.prefix_of(request.agent.session)
        if prefix is not None and prefix.request_id != request.request_id:
            self._retained_prefixes.consume(prefix, found=request.num_cached_tokens > 0)
        elif (
            request.continues_agent_session
            and not request.finds_retained_prefix
            and not request.num_preemptions
        ):
            assert request.queued_at is not None
            self._rule.learn_queueing_delay(self._clock() - request.queued_at)

    def on_released(self, request: Request) -> None:
        name = request.agent.session
        if not name:
            return
        self._sessions[name].waiting.pop(request.seq_id, None)
        if request.seq_id in self._evict_first:  # its blocks are free by now
            self._kv_cache.pool.evict_first(self._evict_first.pop(request.seq_id))
        session, now = self._sessions[name], self._clock()
        session.num_unfinished -= 1
        if not session.num_unfinished:
            if session.was_last:
                self._end_session(name, session)
                return
            session.last_seen = now
            self._sessions[name] = self._sessions.pop(name)
        prefix = self._retained_prefixes.prefix_of(name)
        if prefix is not None and prefix.is_awaited and not session.waiting:
            self._retained_prefixes.end_hold(prefix, now + PROVISIONAL_SECONDS)

    # Internals

    def _count_own_tokens(self, request: Request) -> None:
        """Mark a found prefix of another session as shared; the prompt is now the session's own."""
        session = self._sessions.get(request.agent.session)
        if request.num_cached_tokens > (session.num_own_tokens if session is not None else 0):
            self._kv_cache.mark_shared_prefix(request)
        if session is not None:
            session.num_own_tokens = max(session.num_own_tokens, request.num_tokens)

    def _begin_turn(self, session: AgentSession, request: Request, now: float) -> None:
        before, session.request_id = session.request_id, request.request_id
        first_block = request.block_hashes[0] if request.block_hashes else b""
        if first_block != session.first_block:
            session.first_block = first_block
            session.num_first_tokens = request.num_prompt_tokens
            session.num_own_tokens = 0
        session.num_turns += 1
        session.waited = None
        session.was_last = False
        if session.ended is not None:
            seconds = now - session.ended
            self._tool_seconds.append(seconds)
            if session.tool is not None:
                self._rule.learn_duration(session.tool, seconds)
            else:
                session.waited, session.waited_after = seconds, before
        session.ended = session.tool = None

    def _set_expiry(self, request_id: int, name: str, tool: str) -> None:
        prefix = self._retained_prefixes.prefix_of(name)
        if prefix is None or prefix.request_id != request_id or prefix.is_awaited:
            return
        decision = self._rule.decide(tool, prefix.num_tokens)
        if prefix.by_client:
            self._retained_prefixes.set_value(prefix, decision.value)
        else:
            self._retained_prefixes.set_expiry(
                prefix, decision.seconds, decision.value, self._clock()
            )

    def _retain(self, request: Request, now: float) -> None:
        decision = self._rule.provisional(request.num_tokens)
        wanted = by_client(request.agent.ttl_ms)
        seconds = decision.seconds if wanted is None else wanted
        if not decision.seconds or not seconds:
            self._retained_prefixes.release_prefix(request.agent.session, "newer turn")
            return
        blocks = self._kv_cache.findable_blocks(request)
        self._retained_prefixes.retain(
            request, blocks, seconds, decision.value, now, by_client=wanted is not None
        )

    def _end_session(self, name: str, session: AgentSession) -> None:
        """Forget a session whose last turn has ended."""
        assert session.ended is not None
        self._session_seconds.append(session.ended - session.arrival)
        self._rule.learn_num_turns(session.num_turns)
        del self._sessions[name]

    def _forget_old(self, now: float) -> None:
        """Forget the session that was seen longest ago, if that is too long or one is too many."""
        name, session = next(iter(self._sessions.items()))
        if session.num_unfinished:
            if (
                len(self._sessions) > MAX_SESSIONS
            ):  # it moves to the end again when its requests end
                self._sessions[name] = self._sessions.pop(name)
            return
        if len(self._sessions) <= MAX_SESSIONS and now - session.last_seen < FORGET_SECONDS:
            return
        self._retained_prefixes.release_prefix(name, "forgotten")
        if session.ended is not None:
            self._rule.learn_duration(session.tool or "", math.inf)
        self._rule.learn_num_turns(session.num_turns)
        del self._sessions[name]
