"""The overload load generator against a scripted server."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest

from tests.benchmarks.arrivals import (
    Attempt,
    ClosingServer,
    PartResult,
    RequestShape,
    churn,
    overload_clients,
)
from tests.benchmarks.overload import OverloadReport, OverloadRun
from tests.benchmarks.usage import MemoryLog

SHAPE = RequestShape(input_tokens=4, output_tokens=2)
EVENT = json.dumps({"choices": [{"token_ids": [7, 8]}]})
STREAM = f"data: {EVENT}\n\ndata: [DONE]\n\n"
FULL = "HTTP/1.1 503 x\r\nretry-after: 9\r\ncontent-length: 2\r\n\r\n{}"


def ok(text: str) -> str:
    return f"HTTP/1.1 200 x\r\ncontent-length: {len(text)}\r\n\r\n{text}"


@contextlib.asynccontextmanager
async def serving(answer: Callable[[int], str]) -> AsyncIterator[tuple[str, Counter[str]]]:
    """Run a server that answers the n-th request with the n-th reply; yield its URL and counts."""
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


async def test_answers_refusals_and_failures() -> None:
    answers = {1: ok(STREAM), 2: FULL, 3: ok("data: {}\n\n"), 4: "HTTP/1.1 500 x\r\n\r\n"}
    async with serving(answers.__getitem__) as (url, _), overload_clients(url, SHAPE) as clients:
        attempts = [await clients.send_request() for _ in range(3)]
    result = PartResult(attempts, 2.0)
    assert [each.status for each in result.accepted] == [200]
    assert result.accepted[0].token_ids == [7, 8]
    assert [each.retry_after for each in result.refused] == ["9"]
    assert [each.error for each in result.failed] == ["the stream ended without [DONE]"]
    assert (result.requests_per_second, result.tokens_per_second) == (0.5, 1.0)


async def test_an_error_event_and_a_lost_connection_are_failures() -> None:
    event = 'data: {"error": {"message": "broken"}}\n\ndata: [DONE]\n\n'
    async with serving(lambda _: ok(event)) as (url, _), overload_clients(url, SHAPE) as clients:
        assert (await clients.send_request()).error == "broken"
    async with overload_clients(url, SHAPE) as clients:
        assert "ConnectError" in (await clients.send_request()).error


async def test_an_open_loop_has_its_rate_even_if_requests_are_refused() -> None:
    ticks: list[int] = []
    memory = MemoryLog(1)
    memory.sample = lambda: ticks.append(1)  # type: ignore[method-assign]
    async with serving(lambda _: FULL) as (url, seen), overload_clients(url, SHAPE) as clients:
        result = await clients.run_open_loop(200.0, 0.25, memory)
        assert seen["requests"] == len(result.refused) == 50
        assert ticks == [1]


async def test_a_closed_loop_keeps_its_number_of_requests_open() -> None:
    async with (
        serving(lambda _: ok(STREAM)) as (url, seen),
        overload_clients(url, SHAPE) as clients,
    ):
        result = await clients.run_closed_loop(3, 0.1)
        assert len(result.accepted) >= 3
        assert seen["connections"] <= 3


async def test_clients_that_disconnect_leave_no_connection() -> None:
    async with serving(lambda _: "") as (url, seen):
        number = await churn(url, SHAPE, 100.0, 0.1, 0.11)
        assert number >= 10
        while seen["left"] < number:
            await asyncio.sleep(0.001)
        assert seen["connections"] == number


async def test_the_table_has_a_row_for_each_part() -> None:
    async with serving(lambda _: ok(STREAM)) as (url, _), overload_clients(url, SHAPE) as clients:
        run = OverloadRun(url, SHAPE, clients, MemoryLog(1))
        run.memory.sample = lambda: None  # type: ignore[method-assign]
        await run.measure_capacity(2, 0.05)
        await run.measure_overload(100.0, 0.05)
        await run.measure_churn(1, 100.0, 0.05, 0.01)
    assert len(run.report.parts) == 6
    assert run.report.table().row_count == 6
    shares = [part["share_of_alone"] for part in run.report.to_dict()["parts"]]
    assert [share is None for share in shares] == [True] * 3 + [False] * 3
    assert run.report.problems() == []
    assert run.report.full.attempts
    assert run.report.overload.attempts
    assert run.report.alone.attempts
    assert run.report.with_churn.attempts
    assert run.report.with_control.attempts
    assert run.report.with_stay.attempts


async def test_the_control_server_only_closes_connections() -> None:
    with ClosingServer() as control:
        url = urlsplit(control.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"POST / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()


def test_problems_name_the_part() -> None:
    report = OverloadReport({"overload": PartResult([Attempt(status=500)], 1.0)})
    assert report.problems() == ["overload: 1 failed, such as: 500 "]


def accepted(first_token: float, tokens: int = 10) -> Attempt:
    return Attempt(200, first_token=first_token, token_ids=[7] * tokens)


def refused(seconds: float = 0.01, hint: str = "3") -> Attempt:
    return Attempt(503, answered=seconds, retry_after=hint)


def missed_limits(
    overload: list[Attempt],
    with_churn: list[Attempt],
    grown: float = 0.0,
    left: list[str] | None = None,
) -> list[str]:
    """Return the limits missed by a run with a typical wait of 1 s and 10 tokens/s per client."""
    report = OverloadReport(
        full=PartResult([accepted(1.0)], 1.0),
        overload=result_of(overload),
        alone=PartResult([accepted(1.0)], 1.0),
        with_churn=result_of(with_churn),
    )
    for name in ("full", "overload", "alone", "with_churn"):
        report.add_part(name, getattr(report, name))
    memory = MemoryLog(1)
    memory.sizes["tokend: api 0"] = [100.0, 100.0, 100.0 + grown]
    return [each.name for each in report.limits(memory, left or []) if not each.met]


def result_of(attempts: list[Attempt]) -> PartResult:
    return PartResult(attempts, 1.0)


GOOD_OVERLOAD = [accepted(1.2), refused()]
GOOD_CHURN = [accepted(1.0)]


@pytest.mark.parametrize(
    ("overload", "with_churn", "missed"),
    [
        (GOOD_OVERLOAD, GOOD_CHURN, []),
        (GOOD_OVERLOAD, [accepted(1.0, 9)], []),
        (GOOD_OVERLOAD, [accepted(1.0, 8)], ["throughput beside disconnecting clients"]),
        (GOOD_OVERLOAD, [refused()], ["throughput beside disconnecting clients"]),
        (
            [accepted(1.3), refused()],
            GOOD_CHURN,
            ["first token of accepted requests, overload / full"],
        ),
        ([refused()], GOOD_CHURN, ["first token of accepted requests, overload / full"]),
        ([accepted(1.0), refused(1.1)], GOOD_CHURN, ["time of refusals, p99"]),
        ([accepted(1.0)], GOOD_CHURN, ["time of refusals, p99"]),
        ([accepted(1.0), refused(hint="")], GOOD_CHURN, ["refusals without Retry-After"]),
        ([*GOOD_OVERLOAD, Attempt(500)], GOOD_CHURN, ["failed requests"]),
    ],
)
def test_every_limit_can_be_missed(
    overload: list[Attempt], with_churn: list[Attempt], missed: list[str]
) -> None:
    assert missed_limits(overload, with_churn) == missed


def test_growing_memory_and_nonzero_gauges_miss_limits() -> None:
    assert missed_limits(GOOD_OVERLOAD, GOOD_CHURN, grown=8.5) == ["api 0: growth"]
    assert missed_limits(GOOD_OVERLOAD, GOOD_CHURN, left=["a gauge stays at 1"]) == [
        "gauges not back at 0"
    ]


def test_skipped_parts_have_no_limits() -> None:
    names = [each.name for each in OverloadReport().limits(MemoryLog(1), [])]
    assert names == ["failed requests", "gauges not back at 0"]


def test_memory_growth_is_measured_after_the_first_tenth() -> None:
    memory = MemoryLog(1)
    memory.sizes["x"] = [1.0, 50.0, *[60.0] * 18]
    assert memory.growth("x") == 0.0
