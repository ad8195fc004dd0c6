"""Prefill throttling: prompt tokens per step beside decodes."""

import itertools
from typing import Any

import pytest

from engine_core.kv_connector.base import NO_MATCH, Match
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.limits import (
    MIN_PROMPT_TOKENS,
    SHORT_SECONDS,
    PrefillThrottle,
)
from proto.messages.scheduler_output import SchedulerOutput
from tests.engine_core.scheduler.external_kv import WAITS
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.kv_connector import FakeConnector
from tests.fakes.messages import make_request

DECODE = 0.05
TOKEN = 0.0005


def seconds_of(num_decoding: int, num_prompt_tokens: int) -> float:
    """Return the time of a step: 50 ms for any number of decodes, 0.5 ms per prompt token."""
    return (DECODE if num_decoding else 0.0) + TOKEN * num_prompt_tokens


def seconds_of_step(output: SchedulerOutput) -> float:
    num_decoding = output.cached_requests.num_scheduled_tokens.count(1)
    return seconds_of(num_decoding, output.total_num_scheduled_tokens - num_decoding)


def see_requests(
    throttle: PrefillThrottle, num_prompt_tokens: int, num_output_tokens: int, num_cached: int = 0
) -> None:
    """Let a throttle see the end of a request. num_cached: prompt tokens with KV."""
    request = make_request(1, [1] * num_prompt_tokens)
    request.num_cached_tokens = num_cached
    request.all_token_ids += [1] * num_output_tokens
    throttle.on_admitted(request, 1)
    throttle.on_released(request)


def learnt(slowdown: float = 2.0, token_budget: int = 256) -> PrefillThrottle:
    """Return a throttle that knows the times, and that requests have short prompts."""
    throttle = PrefillThrottle(token_budget, slowdown)
    throttle.learn_step(16, 0, seconds_of(16, 0))
    throttle.learn_step(15, 200, seconds_of(15, 200))
    see_requests(throttle, num_prompt_tokens=10, num_output_tokens=100)
    return throttle


@pytest.mark.parametrize(("slowdown", "expected"), [(2.0, 96), (1.5, 48), (9.0, 256)])
def test_a_step_takes_the_multiple_of_one_that_decodes(slowdown: float, expected: int) -> None:
    """In multiples of 16 rows: 0.05 s are 100 tokens."""
    assert learnt(slowdown).prompt_tokens(16, 16) == expected


def test_a_step_has_room_for_a_chunk_that_is_worth_its_overhead() -> None:
    assert learnt(1.01).prompt_tokens(16, 16) == MIN_PROMPT_TOKENS


@pytest.mark.parametrize(
    ("num_decoding", "expected"),
    [(1, 80), (2, 80), (4, 80), (9, 112), (10, 112), (16, 160), (99, 160)],
)
def test_unseen_batch_sizes_are_interpolated(num_decoding: int, expected: int) -> None:
    """0.04 s with 2, 0.06 with 9, 0.08 with 16; beyond them as the last."""
    throttle = PrefillThrottle(256, 2.0)
    throttle.learn_step(16, 0, 0.08)
    throttle.learn_step(2, 0, 0.04)
    throttle.learn_step(9, 100, 0.06 + 100 * TOKEN)
    see_requests(throttle, num_prompt_tokens=10, num_output_tokens=100)
    assert throttle.prompt_tokens(num_decoding, num_decoding) == expected


def test_prompts_are_not_throttled_without_decodes() -> None:
    assert learnt().prompt_tokens(0, 16) == 256


def test_until_a_request_has_ended_a_step_is_full() -> None:
    throttle = PrefillThrottle(256, 2.0)
    see_requests(throttle, num_prompt_tokens=10, num_output_tokens=0)  # aborted in the queue
    assert throttle.prompt_tokens(16, 16) == 256
    see_requests(throttle, num_prompt_tokens=10, num_output_tokens=100)
    assert throttle.prompt_tokens(16, 16) == MIN_PROMPT_TOKENS, "times are unknown"
    throttle.learn_step(3, 200, 0.3)  # the prompt's share of the time is unknown
    throttle.learn_step(16, 0, DECODE)
    assert throttle.prompt_tokens(16, 16) == MIN_PROMPT_TOKENS
    throttle.learn_step(15, 200, seconds_of(15, 200))
    assert throttle.prompt_tokens(16, 16) == 96


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_steps_without_timings_are_not_learnt_from(seconds: float) -> None:
    throttle = learnt()
    throttle.learn_step(16, 0, seconds)
    throttle.learn_step(15, 200, seconds)
    assert throttle.prompt_tokens(16, 16) == 96


def test_a_short_step_is_not_cut() -> None:
    throttle = PrefillThrottle(256, 2.0)
    throttle.learn_step(1, 0, 0.005)
    throttle.learn_step(1, 100, 0.005 + 100 * 0.00025)
    see_requests(throttle, num_prompt_tokens=10, num_output_tokens=100)
    assert throttle.prompt_tokens(1, 1) == int((SHORT_SECONDS - 0.005) / 0.00025) // 16 * 16


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_output_tokens", "num_requests", "expected"),
    [
        (512, 64, 8, 80),  # 1.25 · 8 · 8
        (512, 64, 14, 144),
        (2000, 64, 8, 256),  # 312, more than a step has
        (512, 64, 100, 256),  # a long queue
        (256, 128, 16, 48),
        (10, 1000, 30, 48),
    ],
)
def test_prompts_keep_up_with_the_requests(
    num_prompt_tokens: int, num_output_tokens: int, num_requests: int, expected: int
) -> None:
    throttle = PrefillThrottle(256, 1.5)
    see_requests(throttle, num_prompt_tokens, num_output_tokens)
    assert throttle.prompt_tokens(4, num_requests) == expected


def test_chunks_grow_with_a_queue_of_longer_prompts() -> None:
    throttle = learnt()
    assert throttle.prompt_tokens(16, 110) == 144


def test_short_requests_before_count_little() -> None:
    """A warm-up, for example: each token counts, not each request."""
    throttle = PrefillThrottle(256, 1.5)
    for _ in range(4):
        see_requests(throttle, num_prompt_tokens=16, num_output_tokens=16)
    see_requests(throttle, num_prompt_tokens=512, num_output_tokens=64)
    see_requests(throttle, num_prompt_tokens=512, num_output_tokens=64)
    assert throttle.prompt_tokens(4, 8) in (64, 80)


def test_cached_tokens_need_no_chunks() -> None:
    throttle = PrefillThrottle(256, 1.5)
    see_requests(throttle, num_prompt_tokens=2000, num_output_tokens=10, num_cached=1990)
    assert throttle.prompt_tokens(4, 4) == MIN_PROMPT_TOKENS


def test_requests_with_drafts_need_their_prompts_sooner() -> None:
    """Of 128 outputs 96 are accepted drafts: a request decodes in 32 steps."""
    throttle = learnt()
    for _ in range(40):
        request = make_request(1, [1] * 256)
        request.all_token_ids += [1] * 128
        request.num_accepted_drafts = 96
        throttle.on_released(request)
    assert throttle.prompt_tokens(16, 16) == 160  # 1.25 * 16 * 256 / 32


def test_one_slow_step_is_soon_forgotten() -> None:
    throttle = learnt()
    throttle.learn_step(16, 0, 100 * DECODE)
    assert throttle.prompt_tokens(16, 16) <= 128
    for _ in range(30):
        throttle.learn_step(16, 0, DECODE)
    assert throttle.prompt_tokens(16, 16) == 96


@pytest.mark.parametrize(
    ("slowdown", "chunked", "expected"),
    [(2.0, True, 48), (None, True, 256), (0.0, True, 256), (2.0, False, 256)],
)
def test_without_the_setting_or_chunks_nothing_is_throttled(
    slowdown: float | None, chunked: bool, expected: int
) -> None:
    throttle = PrefillThrottle(256, slowdown, chunked=chunked)
    see_requests(throttle, num_prompt_tokens=10, num_output_tokens=100)
    assert throttle.prompt_tokens(16, 16) == expected


def decoding_engine(**settings: Any) -> EngineHarness:
    """Return an engine with 15 decodes and known step times."""
    engine = EngineHarness(max_num_batched_tokens=256, enable_prefix_caching=False, **settings)
    engine.step_seconds = seconds_of_step
    for number in range(15):
        engine.add([number] * (200 if number == 0 else 8), 400, ignore_eos=True)
    for _ in range(3):
        engine.step()
    engine.add([20] * 200, 1)
    for _ in range(3):
        engine.step()
    engine.scheduler._prefill_throttle._num_decode_steps = 1e9  # so that the times decide
    return engine


def chunks_beside(engine: EngineHarness, num_tokens: int) -> list[int]:
    """Return the prompt tokens of each step of a prompt, in which all other requests decode."""
    engine.add([30] * num_tokens, 1)
    chunks = []
    while sum(chunks) < num_tokens:
        output = engine.step()
        counts = output.cached_requests.num_scheduled_tokens
        assert counts.count(1) == 15
        chunks.append(output.total_num_scheduled_tokens - 15)
    return chunks


def test_a_prompt_is_spread_over_steps_beside_decodes() -> None:
    assert chunks_beside(decoding_engine(max_prefill_slowdown=2.0), 240) == [96, 96, 48]
    assert chunks_beside(decoding_engine(max_prefill_slowdown=0), 240) == [240]


def test_prompts_share_the_prefill_budget_of_a_step() -> None:
    engine = decoding_engine(max_prefill_slowdown=2.0)
    engine.add([30] * 60, 3)
    engine.add([31] * 60, 3)
    output = engine.step()
    assert [each.num_scheduled_tokens for each in output.new_requests] == [60, 36]
    assert output.cached_requests.num_scheduled_tokens == [1] * 15
    assert engine.scheduler.step_limit == "prompt tokens"
    output = engine.step()
    assert sorted(output.cached_requests.num_scheduled_tokens) == [1] * 16 + [24]
    assert engine.scheduler.step_limit == "requests"


def test_a_prompt_of_just_the_prefill_budget_is_not_limited_by_it() -> None:
    engine = decoding_engine(max_prefill_slowdown=2.0)
    engine.add([30] * 96, 1)
    engine.step()
    assert engine.scheduler.step_limit == "requests"


def test_a_prompt_that_stands_before_others_takes_no_token_of_theirs() -> None:
    engine = decoding_engine(max_prefill_slowdown=2.0)
    first = engine.scheduler.running[0]
    first.num_computed_tokens = 0  # as if preempted
    output = engine.scheduler.schedule()
    seq_ids, counts = output.cached_requests.seq_ids, output.cached_requests.num_scheduled_tokens
    assert counts.pop(seq_ids.index(first.seq_id)) == 96
    assert counts == [1] * 14


@pytest.mark.parametrize("is_async", [False, True])
def test_a_transferred_prompt_does_not_wait_for_the_throttle(is_async: bool) -> None:
    """Prompts in progress use all prompt tokens of a step; its other tokens are unused."""

    def answer(request: Request, num_local: int) -> Match:
        return Match(192, is_async=is_async) if request.num_prompt_tokens == 200 else NO_MATCH

    connector = FakeConnector(lambda request, num_local: NO_MATCH)
    engine = decoding_engine(
        max_prefill_slowdown=2.0, connector=connector, scheduling_policy="priority"
    )
    connector.answer = answer
    engine.add([30] * 1000, 1)
    engine.step()
    transferred = engine.add_one([40] * 200, max_tokens=2, ignore_eos=True)
    if is_async:
        engine.step()
        assert transferred.status is WAITS, "the load starts immediately"
        engine.add([31] * 1000, 1, priority=-1)  # waits for prompt tokens at the head of the queue
        engine.finish_load(transferred)
    output = engine.step()
    assert scheduled(output)[transferred.seq_id] == 8
    assert output.total_num_scheduled_tokens == 15 + 96 + 8
    assert scheduled(engine.step())[transferred.seq_id] == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_transferred_prompt_does_not_wait_behind_a_throttled_one(is_async: bool) -> None:
    """Its lookup, its load and its first step need no prompt tokens."""
    asked: list[int] = []

    def answer(request: Request, num_local: int) -> Match:
        asked.append(request.seq_id)
        return Match(192, is_async=is_async) if request.num_prompt_tokens == 200 else NO_MATCH

    connector = FakeConnector()
    engine = decoding_engine(max_prefill_slowdown=2.0, connector=connector, max_num_seqs=32)
    connector.answer = answer
    engine.add([30] * 1000, 1)
    engine.step()
    ordinary = [engine.add_one([31 + number] * 1000, max_tokens=1) for number in range(20)]
    transferred = [
        engine.add_one([60 + number] * 200, max_tokens=9, ignore_eos=True) for number in range(2)
    ]
    for _ in range(4):  # lookups are spread over steps
        engine.step()
    if is_async:
        for request in transferred:
            assert request.status is WAITS, "the load begins"
            engine.finish_load(request)
        engine.step()
    assert [request.status for request in transferred] == [RequestStatus.RUNNING] * 2
    assert {request.status for request in ordinary} == {RequestStatus.WAITING}
    assert all(asked.count(request.seq_id) <= 1 for request in ordinary[1:])
    assert engine.scheduler.waiting.num_ready == engine.scheduler.kv_transfer.num_without_kv


def test_a_transferred_prompt_does_not_overtake_one_that_waits_for_blocks() -> None:
    connector = FakeConnector()
    engine = decoding_engine(max_prefill_slowdown=2.0, connector=connector, num_blocks=130)
    connector.answer = lambda request, num_local: (
        NO_MATCH if request.num_prompt_tokens == 1000 else Match(192, is_async=True)
    )
    engine.add([30] * 1000, 1)
    engine.step()
    head = engine.add_one([31] * 1900, max_tokens=1)
    behind = engine.add_one([60] * 200, max_tokens=1)
    engine.step()
    assert (head.status, behind.status) == (RequestStatus.WAITING, RequestStatus.WAITING)


def seconds_of_1b(output: SchedulerOutput) -> float:
    """Return the time of a step of a model with a billion parameters on two cores."""
    counts = list(scheduled(output).values())
    num_decoding = counts.count(1)
    num_prompt_tokens = sum(counts) - num_decoding
    unpacking = 0.007 if num_prompt_tokens else 0.0
    return 0.0165 + 0.0021 * num_decoding + unpacking + 0.0017 * num_prompt_tokens


def closed_loop(
    max_prefill_slowdown: float, num_prompt_tokens: int, num_output_tokens: int
) -> tuple[float, list[float]]:
    """Keep 8 requests in progress, 48 in all; return tokens per second and gaps between tokens.

    The gaps are of all but the first 8, before whose end nothing is known of requests.
    """
    now = 0.0
    engine = EngineHarness(
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        clock=lambda: now,
        max_prefill_slowdown=max_prefill_slowdown,
    )
    engine.step_seconds = seconds_of_1b
    numbers = iter(range(48))
    last: dict[int, float] = {}
    gaps = []

    def add() -> None:
        for number in itertools.islice(numbers, 1):
            engine.add([number] * num_prompt_tokens, num_output_tokens, ignore_eos=True)

    for _ in range(8):
        add()
    while engine.scheduler.num_unfinished:
        num_before = engine.scheduler.num_unfinished
        output = engine.send()
        now += seconds_of_1b(output) + 0.001
        for outputs in engine.collect(engine.in_flight.popleft()).values():
            for each in outputs:
                if each.request_id in last and each.request_id >= 108:
                    gaps.append(now - last[each.request_id])
                last[each.request_id] = now
        for _ in range(num_before - engine.scheduler.num_unfinished):
            add()
    return 48 * num_output_tokens / now, gaps


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_output_tokens", "ratio", "lost"),
    [(256, 32, 1.5, 0.05), (64, 32, 5.0, 0.05), (1000, 24, 1.5, 0.02)],
)
def test_even_gaps_cost_little_throughput(
    num_prompt_tokens: int, num_output_tokens: int, ratio: float, lost: float
) -> None:
    """Prompts that come as fast as 8 to 40 tokens per output token are spread over the steps."""
    free, _ = closed_loop(0.0, num_prompt_tokens, num_output_tokens)
    rate, gaps = closed_loop(2.0, num_prompt_tokens, num_output_tokens)
    gaps.sort()
    assert gaps[int(0.99 * len(gaps))] <= ratio * gaps[len(gaps) // 2]
    assert rate >= (1 - lost) * free
