"""The scheduler with a fake worker, and the model of it, through the same random life."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine_core.kv_cache.integrity import check
from engine_core.request import Request
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.pool_model import most_blocks
from tests.fakes.scheduler_model.model import SchedulerModel
from tests.fakes.scheduler_model.sequence import Sequence, Settings, Step

LONGEST = 40
"""Tokens that a request may have; every pool has room for one such request."""
WINDOWS = [(None, 6), (9,), (5, None, 14), (2, 12), (None, 4, 4), (None, 1), (None, None, 8)]
MOST_WAITING = 12
STOPS = frozenset(range(0, 1000, 12))

Draw = Callable[[random.Random], dict[str, Any]]


def windows(rng: random.Random) -> dict[str, Any]:
    return {"windows": rng.choice(WINDOWS)}


def overlapped(rng: random.Random) -> dict[str, Any]:
    return {"overlapped": True}


def pressure(rng: random.Random) -> dict[str, Any]:
    resume, stop, preempt = sorted(rng.choices([0.3, 0.5, 0.7, 0.9, 1.0], k=3))
    return {
        "resume_below": rng.choice([resume, 0.9 * stop]),
        "stop_above": stop,
        "preempt_above": preempt,
        "watermark": rng.choice([0.0, 0.1, 0.3]),
        "whole_prompts": rng.random() < 0.3,
    }


def drawn_settings(rng: random.Random, draws: tuple[Draw, ...]) -> Settings:
    """draws: of what some lives have and others have not."""
    special: dict[str, Any] = {}
    for draw in draws:
        special |= draw(rng)
    settings = Settings(
        num_blocks=0,
        budget=rng.choice([3, 8, 16, 40, 64, 64]),
        longest=rng.choice([0, 0, 4, 6, 8, 12]),
        chunked=rng.random() < 0.8,
        seats=rng.choice([1, 3, 8, 16, 16]),
        by_priority=rng.random() < 0.6,
        caching=rng.random() < 0.8,
        block_size=rng.choice([1, 2, 4]),
        **special,
    )
    least = most_blocks(settings.windows, settings.block_size, LONGEST, settings.longest_chunk)
    return replace(settings, num_blocks=1 + int(least * rng.choice([1.0, 1.2, 2.0, 4.0])))


def engine_of(settings: Settings) -> EngineHarness:
    return EngineHarness(
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        windows=settings.windows,
        max_model_len=LONGEST,
        enable_prefix_caching=settings.caching,
        max_num_batched_tokens=settings.budget,
        long_prefill_token_threshold=settings.longest,
        enable_chunked_prefill=settings.chunked,
        max_num_seqs=settings.seats,
        scheduling_policy="priority" if settings.by_priority else "fcfs",
        async_scheduling=settings.overlapped,
        scheduler_reserve_full_isl=settings.whole_prompts,
        watermark=settings.watermark,
        resume_admission_below=settings.resume_below,
        stop_admission_above=settings.stop_above,
        preempt_above=settings.preempt_above,
    )


class SideBySide:
    """Both start empty; `step` moves them on and compares them."""

    def __init__(self, seed: int, num_tenants: int, draws: tuple[Draw, ...]) -> None:
        self.rng = random.Random(seed)
        self.num_tenants = num_tenants
        settings = drawn_settings(self.rng, draws)
        self.model = SchedulerModel(settings)
        self.engine = engine_of(settings)
        self.sequences: dict[int, Sequence] = {}
        self.load = self.rng.choice([0.1, 0.3, 0.6])
        if num_tenants > 1:
            for tenant in range(num_tenants):
                self.add(tenant)
            # All begin at the same place, and nobody is lifted, which has its own tests.
            self.engine.scheduler._courtesy._ledger._credit = 1 << 40

    def add(self, tenant: int) -> None:
        """Prompts of a few families, so that many begin alike and some are equal."""
        rng = self.rng
        length = rng.choice([1, 4, 5, 7, 9, 11, 12, 13, 18, 20, 25, 30, 38])
        family = rng.randrange(3)
        prompt = [family * 100 + position for position in range(length)]
        if rng.random() < 0.5:
            start = rng.randrange(length)
            prompt[start:] = [300 + rng.randrange(600) for _ in prompt[start:]]
        stops = STOPS if rng.random() < 0.3 else frozenset()
        requests = self.engine.add(
            prompt,
            rng.randrange(1, LONGEST - length + 1),
            n=rng.choice([1, 1, 2, 3]),
            priority=rng.randrange(3),
            arrival_time=float(rng.randrange(5)),
            tenant=tenant,
            cache_salt="salt" if rng.random() < 0.1 else None,
            eos_token_ids=(),
            stop_token_ids=tuple(stops),
        )
        for each in requests:
            sequence = self.sequences[each.handle] = sequence_of(each, stops)
            self.model.add(sequence)

    def abort(self) -> None:
        unfinished = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        if unfinished:
            request = self.rng.choice(unfinished)
            self.engine.scheduler.abort(request.request_id, request.choice)
            self.model.remove(self.sequences[request.handle])

    def reset(self) -> None:
        """With a step in flight, those that lose their blocks lack a token at their turn."""
        assert self.engine.scheduler.reset_prefix_cache(preempting=True)
        self.model.reset()

    def step(self) -> Step:
        """Compare one step; returns the model's."""
        if self.rng.random() < self.load and len(self.model.waiting) < MOST_WAITING:
            self.add(self.rng.choice([0, *range(self.num_tenants)]) if self.num_tenants > 1 else 0)
        if self.rng.random() < 0.03:
            self.abort()
        if self.rng.random() < 0.01:
            self.reset()
        step = self.model.step()
        output = self.engine.step()
        assert output.preempted_handles == step.victims
        assert scheduled(output) == step.tokens
        cached = output.cached_requests
        computed = {new.handle: new.num_computed_tokens for new in output.new_requests}
        starts = dict(zip(cached.handles, cached.num_computed_tokens, strict=True))
        computed |= {handle: starts[handle] for handle in cached.resumed_handles}
        assert computed == step.hits
        assert output.block_copies == step.copies
        self._compare_pools()
        self._compare_requests()
        return step

    def _compare_pools(self) -> None:
        pool, model = self.engine.kv_cache.pool, self.model.pool
        assert list(pool.free_queue) == model.free
        assert {block for _, block in pool.index.items()} == {block for _, block in model.found}
        for handle, tables in model.tables.items():
            assert self.engine.kv_cache.block_ids(handle) == tables

    def _compare_requests(self) -> None:
        scheduler = self.engine.scheduler
        assert [each.handle for each in scheduler.running] == [
            each.handle for each in self.model.running
        ]
        assert [each.handle for each in scheduler.waiting] == self.model.tenants.line()
        for request in scheduler.running + list(scheduler.waiting):
            sequence = self.sequences[request.handle]
            assert request.all_token_ids == sequence.tokens
            assert request.num_output_placeholders == self.model.num_unknown(sequence)

    def assert_sound(self) -> None:
        assert check(self.engine.kv_cache) == []


def sequence_of(request: Request, stops: frozenset[int]) -> Sequence:
    return Sequence(
        request.handle,
        list(request.prompt_token_ids),
        request.max_tokens,
        (request.priority, request.arrival_time, request.request_id, request.choice),
        choice=request.choice,
        family=request.request_id,
        tenant=request.tenant,
        salt=request.cache_salt,
        stops=stops,
    )
