"""The load generator for overload, against a server that answers what the test says."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest

from deploy import cli
from deploy.bench.overload.arrivals import ClosingServer, Offer, Outcome, Recipe, churn, customers
from deploy.bench.overload.bench import OverloadRun, Record
from deploy.bench.processes import Memory

RECIPE = Recipe(input_tokens=4, output_tokens=2)
EVENT = json.dumps({"choices": [{"token_ids": [7, 8]}]})
STREAM = f"data: {EVENT}\n\ndata: [DONE]\n\n"
FULL = "HTTP/1.1 503 x\r\nretry-after: 9\r\ncontent-length: 2\r\n\r\n{}"


def ok(text: str) -> str:
    return f"HTTP/1.1 200 x\r\ncontent-length: {len(text)}\r\n\r\n{text}"


@contextlib.asynccontextmanager
async def serving(answer: Callable[[int], str]) -> AsyncIterator[tuple[str, Counter[str]]]:
    """A server that answers the n-th request so; yields its URL and what it has seen."""
    seen: Counter[str] = Counter()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen["connections"] += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                assert len(json.loads(await reader.readexactly(length))["prompt"]) == 4
                seen["requests"] += 1
                writer.write(answer(seen["requests"]).encode())
        seen["left"] += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{port}", seen


async def test_answers_and_refusals_are_told_apart() -> None:
    answers = {1: ok(STREAM), 2: FULL, 3: ok("data: {}\n\n"), 4: "HTTP/1.1 500 x\r\n\r\n"}
    async with serving(answers.__getitem__) as (url, _), customers(url, RECIPE) as clients:
        offers = [await clients.offer() for _ in range(3)]
    outcome = Outcome(offers, 2.0)
    assert [each.status for each in outcome.accepted] == [200]
    assert outcome.accepted[0].token_ids == [7, 8]
    assert [each.retry_after for each in outcome.refused] == ["9"]
    assert [each.error for each in outcome.failed] == ["the stream ended without [DONE]"]
    assert (outcome.requests_per_second, outcome.tokens_per_second) == (0.5, 1.0)


async def test_an_error_event_and_a_lost_connection_are_failures() -> None:
    event = 'data: {"error": {"message": "broken"}}\n\ndata: [DONE]\n\n'
    async with serving(lambda _: ok(event)) as (url, _), customers(url, RECIPE) as clients:
        assert (await clients.offer()).error == "broken"
    async with customers(url, RECIPE) as clients:
        assert "ConnectError" in (await clients.offer()).error


async def test_a_flood_comes_at_its_rate_whatever_becomes_of_it() -> None:
    ticks: list[int] = []
    async with serving(lambda _: FULL) as (url, seen), customers(url, RECIPE) as clients:
        outcome = await clients.flood(200.0, 0.25, lambda: ticks.append(1))
        assert seen["requests"] == len(outcome.refused) == 50
        assert ticks == [1]


async def test_so_many_are_always_under_way() -> None:
    async with serving(lambda _: ok(STREAM)) as (url, seen), customers(url, RECIPE) as clients:
        outcome = await clients.keep(3, 0.1)
        assert len(outcome.accepted) >= 3
        assert seen["connections"] <= 3


async def test_who_does_not_stay_leaves_nothing_behind() -> None:
    async with serving(lambda _: "") as (url, seen):
        number = await churn(url, RECIPE, 100.0, 0.1, lambda: seen["connections"] >= 10)
        assert number >= 10
        while seen["left"] < number:
            await asyncio.sleep(0.001)
        assert seen["connections"] == number


async def test_the_table_has_a_row_for_each_part() -> None:
    async with serving(lambda _: ok(STREAM)) as (url, _), customers(url, RECIPE) as clients:
        run = OverloadRun(url, RECIPE, clients, Memory(1))
        run.memory.look = lambda: None  # type: ignore[method-assign]
        await run.fill(2, 0.05)
        await run.flood(100.0, 0.05)
        await run.beside_churn(1, 100.0, 0.05, 0.01)
    assert len(run.record.outcomes) == 6
    assert run.record.table().row_count == 6
    shares = [part["share_of_alone"] for part in run.record.plain()["parts"]]
    assert [share is None for share in shares] == [True] * 3 + [False] * 3
    assert run.record.problems() == []
    assert run.record.full.offers
    assert run.record.flood.offers
    assert run.record.alone.offers
    assert run.record.beside.offers
    assert run.record.control.offers
    assert run.record.beside_stays.offers


async def test_the_control_only_closes() -> None:
    with ClosingServer() as control:
        url = urlsplit(control.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"POST / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()


def test_problems_name_the_part() -> None:
    record = Record({"flood": Outcome([Offer(status=500)], 1.0)})
    assert record.problems() == ["flood: 1 failed, such as: 500 "]


def accepted(first_token: float, tokens: int = 10) -> Offer:
    return Offer(200, first_token=first_token, token_ids=[7] * tokens)


def refused(seconds: float = 0.01, hint: str = "3") -> Offer:
    return Offer(503, answered=seconds, retry_after=hint)


def judged(
    flood: list[Offer], beside: list[Offer], grown: float = 0.0, left: list[str] | None = None
) -> list[str]:
    """The limits missed by a run whose usual wait is 1 s and whose clients get 10 tokens/s."""
    record = Record(
        full=Outcome([accepted(1.0)], 1.0),
        flood=record_of(flood),
        alone=Outcome([accepted(1.0)], 1.0),
        beside=record_of(beside),
    )
    for name in ("full", "flood", "alone", "beside"):
        record.note(name, getattr(record, name))
    memory = Memory(1)
    memory.sizes["tokend: api 0"] = [100.0, 100.0, 100.0 + grown]
    return [each.name for each in record.limits(memory, left or []) if not each.kept]


def record_of(offers: list[Offer]) -> Outcome:
    return Outcome(offers, 1.0)


GOOD_FLOOD = [accepted(1.2), refused()]
GOOD_CHURN = [accepted(1.0)]


@pytest.mark.parametrize(
    ("flood", "beside", "missed"),
    [
        (GOOD_FLOOD, GOOD_CHURN, []),
        (GOOD_FLOOD, [accepted(1.0, 9)], []),
        (GOOD_FLOOD, [accepted(1.0, 8)], ["throughput beside those who leave"]),
        (GOOD_FLOOD, [refused()], ["throughput beside those who leave"]),
        ([accepted(1.3), refused()], GOOD_CHURN, ["first token of the accepted, flood / full"]),
        ([refused()], GOOD_CHURN, ["first token of the accepted, flood / full"]),
        ([accepted(1.0), refused(1.1)], GOOD_CHURN, ["answer to the refused, p99"]),
        ([accepted(1.0)], GOOD_CHURN, ["answer to the refused, p99"]),
        ([accepted(1.0), refused(hint="")], GOOD_CHURN, ["refused without Retry-After"]),
        ([*GOOD_FLOOD, Offer(500)], GOOD_CHURN, ["failed requests"]),
    ],
)
def test_each_limit_is_missed_by_what_it_is_for(
    flood: list[Offer], beside: list[Offer], missed: list[str]
) -> None:
    assert judged(flood, beside) == missed


def test_memory_that_grows_and_gauges_that_stay_are_limits_too() -> None:
    assert judged(GOOD_FLOOD, GOOD_CHURN, grown=8.5) == ["api 0: growth"]
    assert judged(GOOD_FLOOD, GOOD_CHURN, left=["a gauge stays at 1"]) == ["left behind"]


def test_a_part_that_was_not_run_has_no_limits() -> None:
    names = [each.name for each in Record().limits(Memory(1), [])]
    assert names == ["failed requests", "left behind"]


def test_growth_is_counted_after_the_first_tenth() -> None:
    memory = Memory(1)
    memory.sizes["x"] = [1.0, 50.0, *[60.0] * 18]
    assert memory.growth("x") == 0.0


def test_the_command_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    assert "overload" in capsys.readouterr().out
    assert cli.main(["bench"]) == cli.main(["bench", "everything"]) == 2
    assert "  overload  " in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "overload", "--help"])
    assert caught.value.code == 0
    assert "--flood-minutes" in capsys.readouterr().out
