"""The soak test: connections, memory growth, latency drift and plot."""

import asyncio
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.limits import quantile
from tests.benchmarks import soak
from tests.benchmarks.command import run
from tests.benchmarks.plot import PlotPanel, label, linear_scale, plot_page
from tests.benchmarks.soak import (
    AnswerError,
    Connection,
    Load,
    Report,
    Sample,
    growths,
    request_bytes,
    slope,
)
from tests.benchmarks.usage import ProcessUsage

WHOLE = b'HTTP/1.1 200 OK\r\ncontent-length: 25\r\n\r\n{"completion_tokens": 3}\r\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
REQUEST = request_bytes("/v1/completions", {"prompt": "x"})


@asynccontextmanager
async def server(answer: Callable[[bytes], bytes]) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run a server that answers requests with given bytes; yield its port and requests."""
    requests: list[bytes] = []
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.rsplit(b"Content-Length: ", 1)[1])
                requests.append(await reader.readexactly(length))
                writer.write(answer(requests[-1]))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1], connections
        for each in connections:
            each.close()


async def test_requests_share_a_connection() -> None:
    answers = iter([WHOLE, CHUNKED, WHOLE])
    async with server(lambda request: next(answers)) as (port, connections):
        connection = Connection("127.0.0.1", port)
        assert b"completion_tokens" in await connection.ask(REQUEST)
        assert b"[DONE]" in await connection.ask(REQUEST)
        assert b"completion_tokens" in await connection.ask(REQUEST)
        assert len(connections) == 1
        connection.drop()


async def test_an_error_has_its_status_and_text() -> None:
    refusal = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"
    async with server(lambda request: refusal) as (port, _):
        connection = Connection("127.0.0.1", port)
        with pytest.raises(AnswerError, match="status 503: busy"):
            await connection.ask(REQUEST)
        connection.drop()


async def test_a_disconnect_is_followed_by_a_new_connection() -> None:
    async with server(lambda request: CHUNKED) as (port, connections):
        connection = Connection("127.0.0.1", port)
        await connection.ask_and_leave(REQUEST, answered=True)
        await connection.ask(REQUEST)
        assert len(connections) == 2
        connection.drop()


async def test_a_load_counts_and_ends() -> None:
    def answer(request: bytes) -> bytes:
        return CHUNKED if b'"stream": true' in request else WHOLE

    async with server(answer) as (port, _):
        load = Load("127.0.0.1", port, 4, 3, lambda number: number >= 200)
        await load.run()
    assert 200 <= load.num_requests < 204
    assert (load.num_left, load.failures) == (3, [])
    assert len(load.pop_latencies()) == load.num_requests - load.num_left
    assert load.pop_latencies() == []


async def test_wrong_answers_are_failures_and_limited() -> None:
    async with server(lambda request: CHUNKED) as (port, _):
        load = Load("127.0.0.1", port, 4, 3, lambda number: False)
        await load.run()
    assert len(load.failures) >= 100
    assert "completion_tokens" in load.failures[0]


def samples(
    mib: Callable[[int], float], p99_ms: Callable[[int], float] = lambda number: 2.0
) -> list[Sample]:
    return [
        Sample(
            seconds=float(number),
            requests=number * 10_000,
            requests_per_second=1000.0,
            p50_ms=1.0,
            p99_ms=p99_ms(number),
            blocks=0.0,
            usage={"tokend: api 0": ProcessUsage(1, 0.0, mib(number), 10, 5)},
        )
        for number in range(51)
    ]


def missed(taken: list[Sample], failures: int = 0, after: tuple[str, ...] = ()) -> list[str]:
    load = Load("127.0.0.1", 1, 1, 3, lambda number: True)
    load.failures += ["status 500"] * failures
    return [each.name for each in Report(load, taken, after, "x").limits if not each.met]


def test_growth_per_hundred_thousand_requests_after_the_warm_up() -> None:
    slow = samples(lambda number: max(number, 5) * 0.05)
    assert growths(slow)[0].mib == pytest.approx(0.5)
    assert missed(slow) == []
    fast = samples(lambda number: number * 0.4)
    assert growths(fast)[0].mib == pytest.approx(4.0)
    assert missed(fast) == ["api 0: growth"]


def test_a_short_run_may_grow_a_little() -> None:
    short = samples(lambda number: number * 0.4)[:6]
    assert growths(short)[0].mib == pytest.approx(4.0)
    assert missed(short) == []


def test_latency_may_not_drift_after_the_warm_up() -> None:
    flat: Callable[[int], float] = lambda number: 1.0  # noqa: E731
    assert missed(samples(flat, lambda number: 9.0 if number < 5 else 2.0)) == []
    assert missed(samples(flat, lambda number: 2.0 + 0.02 * number)) == []
    assert missed(samples(flat, lambda number: 2.0 + 0.1 * number)) == ["p99, last quarter / first"]
    short = samples(flat, lambda number: 2.0 + number)[:16]
    assert missed(short) == [], "too few samples"
    silent = samples(flat, lambda number: 0.0)
    assert missed(silent) == []


def test_failures_and_leftovers_miss_limits() -> None:
    flat = samples(lambda number: 1.0)
    assert missed(flat, failures=1) == ["failed requests"]
    assert missed(flat, after=("tokend: api 0: gone",)) == ["left over"]


def test_quantiles_are_measured_values() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], part) for part in (0.0, 0.5, 0.75, 0.99)] == [1, 2, 3, 4]
    assert quantile([5.0], 0.99) == 5.0


def test_the_slope_of_one_point_is_zero() -> None:
    assert slope([(1.0, 2.0), (1.0, 3.0)]) == 0.0


def test_the_plot_is_one_well_formed_file() -> None:
    panel = PlotPanel("memory & more", {"api <0>": [(0.0, 1.0), (10.0, 2.0)], "none": []})
    text = plot_page("a title", ["a note"], [panel, PlotPanel("empty", {})], "requests")
    drawings = [part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    assert len(drawings) == 2
    for drawing in drawings:
        ElementTree.fromstring("<svg" + drawing)
    assert "http" not in text
    assert "api &lt;0&gt;" in text
    assert text.count("<polyline") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--requests", "-5"], "--requests"),
        (["--minutes", "inf"], "--minutes"),
        (["--plot", "/nowhere/soak.html"], "/nowhere/soak.html"),
        (["--json", "/nowhere/soak.json"], "/nowhere/soak.json"),
    ],
)
def test_an_invalid_flag_is_one_line_and_status_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(soak.main, words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_an_output_file_is_unchanged_until_the_run_ends(tmp_path: Path) -> None:
    """It is checked before the run and replaced only by a complete run."""
    plot = tmp_path / "soak.html"
    plot.write_text("the last one")
    assert run(soak.main, ["--plot", str(plot), "--every", "never"]) == 2
    assert plot.read_text() == "the last one"


VALUES = st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=20)


@given(VALUES)
def test_an_axis_from_zero_fits_all_values(values: list[float]) -> None:
    scale = linear_scale(values)
    parts = [scale.position(value) for value in sorted(values)]
    assert parts == sorted(parts)
    assert 0.5 < parts[-1] <= 1 + 1e-9
    assert (scale.ticks[0], scale.position(scale.ticks[-1])) == (0.0, 1.0)
    steps = {round(b - a, 9) for a, b in zip(scale.ticks, scale.ticks[1:], strict=False)}
    assert max(steps) - min(steps) <= 1e-6 * max(steps)


def test_labels() -> None:
    assert [label(each) for each in (0.0, 0.125, 2.5, 10.0, 12500.0)] == [
        *("0", "0.125", "2.5", "10", "12,500")
    ]


def test_repeated_colours_are_dashed() -> None:
    curves = {f"curve {number}": [(1.0, 0.5), (2.0, 1.0)] for number in range(8)}
    text = plot_page("t", [], [PlotPanel("x", curves)], "x")
    drawing = ElementTree.fromstring("<svg" + text.split("<svg")[1].split("</svg>")[0] + "</svg>")
    lines = list(drawing.iter("polyline"))
    assert lines[0].get("style") == lines[7].get("style") != lines[1].get("style")
    assert [line.get("stroke-dasharray") is None for line in lines] == [True] * 7 + [False]
