"""Arrival times and figures of a load test, compared with simple models of both."""

import asyncio
import gc
import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from deploy.bench.client import COMPLETIONS, BenchRequest, Target
from deploy.bench.datasets import (
    RequestSizes,
    Session,
    SessionSeeds,
    conversation_sessions,
    prompt_sessions,
    random_ids,
    single,
)
from deploy.bench.figures import (
    PERCENTILES,
    AnswerComparison,
    figures_of,
)
from deploy.bench.limits import percentile
from deploy.bench.load import (
    LoadGenerator,
    LoadPattern,
    LoadResult,
    frozen_heap,
    gamma_arrivals,
    ramped,
)
from deploy.bench.stream import RequestResult, no_gaps


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_arrivals_depend_on_the_seed_and_end_in_time(burstiness: float) -> None:
    arrivals = list(gamma_arrivals(4.0, burstiness, 7, 1000))
    assert arrivals == list(gamma_arrivals(4.0, burstiness, 7, 1000))
    assert arrivals[-1] == pytest.approx(250.0)
    gaps = np.diff([0.0, *arrivals])
    assert (gaps >= 0).all()
    deviation = 0.0 if math.isinf(burstiness) else 1 / math.sqrt(burstiness)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(deviation, abs=0.2 * deviation + 1e-9)
    if not math.isinf(burstiness):
        assert arrivals != list(gamma_arrivals(4.0, burstiness, 8, 1000))


def test_endless_arrivals_have_the_mean_rate() -> None:
    arrivals = list(itertools.islice(gamma_arrivals(50.0, 1.0, 0, None), 5000))
    assert arrivals[-1] == pytest.approx(100.0, rel=0.05)


def test_the_rate_ramps_up_linearly_and_then_stays() -> None:
    arrivals = list(ramped((each / 100 for each in range(10_000)), 20.0))
    assert arrivals == sorted(arrivals)
    counts, _ = np.histogram(arrivals, bins=np.arange(0.0, 81.0, 5.0))
    assert counts.tolist() == pytest.approx([62.5, 187.5, 312.5, 437.5, *[500] * 12], abs=2)


@pytest.mark.parametrize("number", [1, 2, 3, 10, 101])
def test_percentiles_equal_numpy(number: int) -> None:
    rng = random.Random(number)
    values = [rng.uniform(0, 9) for _ in range(number)]
    for percent in (0, 1, 50, 90, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def result(rng: random.Random) -> RequestResult:
    """Return a random answer or failure."""
    found = RequestResult(requested_tokens=rng.randint(1, 6), waited=rng.random())
    found.started = rng.uniform(0, 20)
    found.first = found.last = found.started + rng.random()
    found.gaps = no_gaps()
    found.num_chunks = rng.randint(1, 6)
    for _ in range(found.num_chunks - 1):
        found.gaps.append(rng.random())
        found.last += found.gaps[-1]
    found.input_tokens = rng.randint(1, 9)
    found.counted_tokens = rng.choice([0, found.num_chunks, found.num_chunks + 2])
    found.error = "broken" if rng.random() < 0.2 else ""
    return found


def test_without_answers_rates_are_zero_and_times_missing() -> None:
    failed = result(random.Random(0))
    failed.error = "broken"
    plain = figures_of("x", LoadResult([failed, failed], [], 8.0, 0.4), {"ttft": 1.0}).to_dict()
    assert (plain["num_completed"], plain["num_failed"], plain["errors"]) == (0, 2, {"broken": 2})
    assert plain["output_tokens_per_s"] == plain["goodput_requests_per_s"] == 0
    assert not [name for name in plain if name.startswith(("ttft", "tpot", "itl", "e2el"))]


@pytest.mark.parametrize("seed", range(20))
def test_figures_equal_a_simple_model(seed: int) -> None:
    """The model follows vLLM's `calculate_metrics`, with numpy."""
    rng = random.Random(seed)
    results = [result(rng) for _ in range(rng.randint(2, 40))]
    results[0].error = ""  # the test above covers a run of failures only
    done = [each for each in results if not each.error]
    lengths = [each.counted_tokens or each.num_chunks for each in done]
    ttfts = [each.first - each.started for each in done]
    latencies = [each.last - each.started for each in done]
    all_tpots = [
        (latency - ttft) / (length - 1) if length > 1 else 0.0
        for latency, ttft, length in zip(latencies, ttfts, lengths, strict=True)
    ]
    tpots = [tpot for tpot, length in zip(all_tpots, lengths, strict=True) if length > 1]
    limits = {"ttft": 500.0, "tpot": 600.0, "e2el": 2500.0}
    good = sum(
        ttft <= 0.5 and tpot <= 0.6 and latency <= 2.5
        for ttft, tpot, latency in zip(ttfts, all_tpots, latencies, strict=True)
    )

    figures = figures_of("x", LoadResult(results, [], 8.0, 0.4), limits)
    plain = figures.to_dict()
    assert plain["num_completed"] == len(done)
    assert plain["num_failed"] == len(results) - len(done)
    assert plain["input_tokens"] == sum(each.input_tokens for each in done)
    assert plain["output_tokens"] == sum(lengths)
    assert plain["output_tokens_per_s"] == sum(lengths) / 8
    assert plain["goodput_requests_per_s"] == good / 8
    assert plain["client_cpu_share"] == pytest.approx(0.05)
    gaps = [gap for each in done for gap in each.gaps]
    for metric, values in (("ttft", ttfts), ("tpot", tpots), ("itl", gaps), ("e2el", latencies)):
        if not values:
            assert f"{metric}_ms_mean" not in plain
            continue
        scaled = 1e3 * np.array(values)
        assert plain[f"{metric}_ms_mean"] == pytest.approx(scaled.mean())
        assert plain[f"{metric}_ms_std"] == pytest.approx(scaled.std())
        for percent in PERCENTILES:
            expected = np.percentile(scaled, percent)
            assert plain[f"{metric}_ms_p{percent}"] == pytest.approx(expected)
    moments = [each.started for each in done]
    under_way = [sum(a.started <= each < a.last for a in done) for each in moments]
    assert plain["peak_concurrency"] == max(under_way)


class FakeClient:
    """A client that answers after some event loop iterations and counts concurrent requests."""

    target = Target("http://nowhere", "m")

    def __init__(self, fail_every: int = 0) -> None:
        self.requests: list[BenchRequest] = []
        self.most = 0
        self._now = 0
        self._fail_every = fail_every

    async def send_request(self, request: BenchRequest, *, waited: float = 0.0) -> RequestResult:
        self.requests.append(request)
        number = len(self.requests)
        self._now += 1
        self.most = max(self.most, self._now)
        for _ in range(1 + number % 3):
            await asyncio.sleep(0)
        self._now -= 1
        found = RequestResult(request.output_tokens, request.keep_text, waited)
        found.texts.append(f"answer {number}")
        if self._fail_every and number % self._fail_every == 0:
            found.error = "broken"
        return found


def sessions(checked: float = 0.0) -> Iterator[Session]:
    return prompt_sessions(SessionSeeds(0, checked), RequestSizes(3, 2), random_ids())


async def run(client: FakeClient, some: Iterator[Session], pattern: LoadPattern) -> LoadResult:
    return await LoadGenerator(client, some, pattern).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_a_closed_loop_keeps_its_concurrency(concurrency: int) -> None:
    client = FakeClient()
    load_result = await run(client, sessions(), LoadPattern(concurrency, max_requests=20))
    assert (client.most, len(client.requests), len(load_result.results)) == (concurrency, 20, 20)
    assert load_result.seconds > 0


async def test_an_open_loop_waits_for_answers_only_at_its_limit() -> None:
    together = [0.0] * 9
    for limit in (None, 1):
        client = FakeClient()
        load_result = await run(client, sessions(), LoadPattern(limit, together, max_requests=9))
        assert len(load_result.results) == 9
        assert (client.most == 1) == (limit == 1)


async def test_a_run_ends_after_its_sessions_requests_or_time() -> None:
    three = itertools.islice(sessions(), 3)
    assert len((await run(FakeClient(), three, LoadPattern(5))).results) == 3
    three = itertools.islice(sessions(), 3)
    assert (
        len((await run(FakeClient(), three, LoadPattern(None, itertools.repeat(0.0)))).results) == 3
    )
    pattern = LoadPattern(None, itertools.repeat(0.0), max_requests=4)
    assert len((await run(FakeClient(), sessions(), pattern)).results) == 4
    pattern = LoadPattern(None, [0.0, 0.001, 9.0], duration=0.5)
    assert len((await run(FakeClient(), sessions(), pattern)).results) == 2
    for pattern in (
        LoadPattern(2, duration=0.02),
        LoadPattern(2, ramp_seconds=0.01, duration=0.02),
    ):
        assert (await run(FakeClient(), sessions(), pattern)).results
    empty = await run(FakeClient(), iter([]), LoadPattern(1))
    assert figures_of("x", empty).output_tokens_per_s == 0


async def test_garbage_collection_skips_prompts_during_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Observer(FakeClient):
        async def send_request(
            self, request: BenchRequest, *, waited: float = 0.0
        ) -> RequestResult:
            frozen.append(gc.get_freeze_count() > 0)
            return await super().send_request(request, waited=waited)

    frozen: list[bool] = []
    monkeypatch.setattr("deploy.bench.load.frozen_heap", frozen_heap)
    await run(Observer(), sessions(), LoadPattern(1, max_requests=2))
    assert frozen == [True, True]
    assert gc.get_freeze_count() == 0


async def test_turns_are_sequential_and_a_failure_ends_the_session() -> None:
    client = FakeClient(fail_every=5)
    talks = itertools.islice(conversation_sessions(SessionSeeds(0), RequestSizes(2, 1), 3), 2)
    load_result = await run(client, talks, LoadPattern(1))
    turns = [len(each.content["messages"]) for each in client.requests]
    assert turns == [1, 3, 5, 1, 3]
    assert client.requests[1].content["messages"][1]["content"] == "answer 1"
    assert [each.error for each in load_result.results] == ["", "", "", "", "broken"]


async def test_answers_are_compared_with_those_of_earlier_runs() -> None:
    answers = AnswerComparison()
    for _ in range(2):
        load_result = await run(FakeClient(), sessions(checked=0.5), LoadPattern(1, max_requests=6))
        assert len(load_result.checked) == 3
        answers.note_all(load_result.checked)
    assert (answers.num_compared, answers.different) == (3, [])
    ask = BenchRequest(COMPLETIONS, {"prompt": "x"}, 9, checked=True)
    for text in ("the cat", "the cow", "the"):
        answers.note(ask, text)
    answers.note(BenchRequest(COMPLETIONS, {"prompt": "x"}, 8, checked=True), "another request")
    assert answers.num_compared == 5
    assert answers.different == [
        "after 5 characters: 'at', then 'ow'",
        "after 3 characters: ' cat', then ''",
    ]


async def test_failed_answers_are_not_compared() -> None:
    one = single(BenchRequest(COMPLETIONS, {"prompt": "x"}, 2, checked=True))
    load_result = await run(FakeClient(fail_every=1), iter([one]), LoadPattern(1))
    assert (len(load_result.results), load_result.checked) == (1, [])
