"""Who watches the engine, and when they are shown what.

    Watch ─▶ counts begin ─ a flush, a step ─▶ something is new ─ VIEW_SECONDS since the last ─▶
    EngineView to all who watch ─ nothing was counted in it, nothing new ─▶ silence

Owns who watches, and the counts since the last view. A view is made while the workers compute,
before the engine waits; it is the same for everybody. After one in which anything was counted
another one follows, so that rates come to zero.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.scheduler.result import ClientOutputs
from engine_core.scheduler.scheduler import Scheduler
from engine_core.transport import FrontEndLinks
from engine_core.view.block_map import block_map
from engine_core.view.owners import Owners
from engine_core.view.shown_requests import blocks_held, request_view, shown_requests
from proto.stats import SchedulerStats
from proto.view import VIEW_SECONDS, EngineView


class Views(Protocol):
    """What the rest of the engine tells of itself, whether anybody watches or not."""

    def watch(self, client: int, *, wanted: bool) -> None:
        """Somebody watches at a front end, or nobody does any more, or it is gone."""
        ...

    def count(self, outputs: ClientOutputs, stats: SchedulerStats | None) -> None:
        """What the front ends are told just now."""
        ...

    def show(self) -> None:
        """Make a view if one is due: the engine is about to wait."""
        ...

    @property
    def seconds_to_next(self) -> float | None:
        """Until a view is due; None while nothing is new, or nobody watches."""
        ...


class NoViews:
    """Nobody may watch."""

    seconds_to_next: float | None = None

    def watch(self, client: int, *, wanted: bool) -> None: ...

    def count(self, outputs: ClientOutputs, stats: SchedulerStats | None) -> None: ...

    def show(self) -> None: ...


NO_VIEWS: Final = NoViews()


class EngineViews:
    """Of one engine. epoch: its own. clock: monotonic seconds."""

    def __init__(
        self,
        front_ends: FrontEndLinks,
        scheduler: Scheduler,
        kv_cache: KVCacheManager,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._front_ends = front_ends
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._epoch = epoch
        self._clock = clock
        self._watching: set[int] = set()
        self._owners = Owners()
        self._is_new = False
        self._shown_at = self._due_at = 0.0
        self._counts = Counts()

    def watch(self, client: int, *, wanted: bool) -> None:
        if not wanted:
            self._watching.discard(client)
            return
        now = self._clock()
        if not self._watching:
            self._counts = Counts()
            self._shown_at = now
            self._due_at = max(self._due_at, now)
        self._watching.add(client)
        self._is_new = True

    def count(self, outputs: ClientOutputs, stats: SchedulerStats | None) -> None:
        if self._watching:
            self._is_new = True
            self._counts.add(outputs, stats)

    def show(self) -> None:
        if not self._is_new or not self._watching:
            return
        now = self._clock()
        if now < self._due_at:
            return
        # Who does not read what it was sent before would only be buried under more.
        clients = [each for each in self._watching if self._front_ends.keeps_up(each)]
        self._due_at = now + VIEW_SECONDS
        if clients:
            view = self.make(now)
            for client in clients:
                self._front_ends.send(client, view)

    @property
    def seconds_to_next(self) -> float | None:
        if not self._is_new or not self._watching:
            return None
        return max(0.0, self._due_at - self._clock())

    def make(self, now: float) -> EngineView:
        """The engine of now; the counts begin anew."""
        scheduler, kv_cache, counts = self._scheduler, self._kv_cache, self._counts
        shown = shown_requests(scheduler)
        held: Mapping[int, int] = blocks_held(kv_cache)
        self._owners.keep([*held, *(each.seq_id for each in shown)])
        numbers = self._owners.numbers
        view = EngineView(
            self._epoch,
            now,
            now - self._shown_at,
            scheduler.step,
            len(scheduler.running),
            len(scheduler.waiting),
            counts.prompt_tokens,
            counts.generation_tokens,
            counts.queried_tokens,
            counts.found_tokens,
            counts.preemptions,
            [request_view(each, numbers[each.seq_id], held.get(each.seq_id, 0)) for each in shown],
            scheduler.num_unfinished - len(shown),
            block_map(kv_cache, numbers),
        )
        self._is_new = counts.begin_anew()
        self._shown_at = now
        return view


class Counts:
    """What an engine did since its last view.

    A request of P prompt tokens and G outputs has P + G - 1 tokens computed, as its last output
    is not: so the tokens of prompts are those computed, less the outputs, more the first ones.
    With a step under way they run ahead of that, and never back.
    """

    def __init__(self) -> None:
        self.generation_tokens = self.queried_tokens = self.found_tokens = self.preemptions = 0
        self._balance = 0

    def add(self, outputs: ClientOutputs, stats: SchedulerStats | None) -> None:
        """outputs: of one flush; stats: those that go with it."""
        for each in outputs.values():
            for output in each:
                number = len(output.new_token_ids)
                self.generation_tokens += number
                self._balance += (output.first is not None) - number
        if stats is not None:
            self._balance += stats.num_scheduled_tokens
            self.queried_tokens += stats.prefix_cache_queries
            self.found_tokens += stats.prefix_cache_hits
            self.preemptions += stats.num_preemptions

    @property
    def prompt_tokens(self) -> int:
        """Computed, whoever's they are."""
        return max(0, self._balance)

    def begin_anew(self) -> bool:
        """Forget all but what runs ahead; whether there was anything."""
        anything = bool(
            self.prompt_tokens or self.generation_tokens or self.queried_tokens or self.preemptions
        )
        self.generation_tokens = self.queried_tokens = self.found_tokens = self.preemptions = 0
        self._balance = min(0, self._balance)
        return anything
