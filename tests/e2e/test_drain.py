"""A real daemon that receives SIGTERM while it streams."""

import asyncio
import contextlib
import json
import signal
import time

import httpx
import pytest

from tests.chaos.streams import Stream, assert_same, requests, run_undisturbed
from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("settings")

BODIES = requests()[:4]
ENDLESS = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


async def until_draining(client: httpx.AsyncClient) -> None:
    while (await client.get("/health")).status_code != 503:
        await asyncio.sleep(0.01)


def test_sigterm_completes_running_streams_and_refuses_new_requests() -> None:
    async def drained(daemon: Daemon, expected: list[Stream]) -> None:
        streams = [Stream(body) for body in BODIES]
        async with httpx.AsyncClient(base_url=daemon.url, timeout=60) as client:
            running = [asyncio.create_task(each.run(client)) for each in streams]
            await asyncio.gather(*(each.reach(3) for each in streams))
            assert (await client.get("/health")).status_code == 200, "a connection to keep"
            daemon.process.send_signal(signal.SIGTERM)
            await until_draining(client)
            refused = await client.post("/v1/completions", json=BODIES[0])
            assert refused.status_code == 503
            assert "draining" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
            assert not any(each.done() for each in running)
            await asyncio.gather(*running)
        for was, now in zip(expected, streams, strict=True):
            assert_same(was, now)

    daemon = Daemon("--dtype", "float32")
    daemon.wait_ready()
    expected = asyncio.run(run_undisturbed(daemon.url, BODIES))
    asyncio.run(drained(daemon, expected))
    assert daemon.wait_exit() == 0, daemon.text
    assert "4 requests in flight may finish" in daemon.text


def test_requests_beyond_the_drain_timeout_are_aborted_without_a_finish_reason() -> None:
    daemon = Daemon("--shutdown-timeout", "1")
    daemon.wait_ready()
    body = ENDLESS | {"stream": True}
    with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        asked = time.monotonic()
        drain = httpx.post(f"{daemon.url}/admin/drain")
        assert (drain.status_code, drain.json()["requests_in_flight"]) == (202, 1)
        rest = [line for line in lines if line]
    assert 0.9 < time.monotonic() - asked < 3.0
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 503
    assert rest[-1] == "data: [DONE]"
    assert not any('"finish_reason": "' in line for line in rest)
    assert daemon.wait_exit() == 0, daemon.text
    assert "1 request not finished: aborted" in daemon.text


def test_a_second_signal_aborts_at_once() -> None:
    daemon = Daemon()
    daemon.wait_ready()
    body = ENDLESS | {"stream": True}
    with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        daemon.process.send_signal(signal.SIGINT)
        while httpx.get(f"{daemon.url}/health").status_code != 503:
            pass
        time.sleep(0.1)  # an earlier signal could merge with the first one
        asked = time.monotonic()
        daemon.process.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert daemon.wait_exit() == 0, daemon.text
    assert time.monotonic() - asked < 4.0


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_drain_of_two_front_ends_says_at_once_what_is_waited_for(by_signal: bool) -> None:
    flags = ("--api-server-count", "2", "--log-format", "json", "--shutdown-timeout", "20")
    daemon = Daemon(*flags)
    daemon.wait_ready()

    def lines(part: str) -> list[dict[str, object]]:
        found = [json.loads(line) for line in list(daemon.output)]
        return [line for line in found if part in line["message"]]

    events = []
    with contextlib.ExitStack() as stack:
        for _ in range(4):  # over a connection each, which both front ends accept
            stream = httpx.stream(
                "POST", f"{daemon.url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=60
            )
            events.append(stack.enter_context(stream).iter_lines())
            next(events[-1])
        if by_signal:
            daemon.process.send_signal(signal.SIGINT)
        else:
            drain = httpx.post(f"{daemon.url}/admin/drain")
            assert (drain.status_code, drain.json()["requests_in_flight"]) == (202, 4)
        assert eventually(lambda: lines("may finish"), 2), daemon.text
        (line,) = lines("may finish")
        assert line["message"] == (
            "4 requests in flight may finish within 20 s, new ones are refused; "
            "a second Ctrl-C or SIGTERM aborts them"
        )
        assert (line["requests_in_flight"], line["seconds"]) == (4, 20)
        time.sleep(0.1)  # an earlier signal could merge with the first one
        daemon.process.send_signal(signal.SIGINT)
        if not by_signal:  # that was the first one
            assert eventually(lambda: len(lines("may finish")) == 2, 2), daemon.text
            assert 15 < float(str(lines("may finish")[1]["seconds"])) < 20
            time.sleep(0.1)
            daemon.process.send_signal(signal.SIGINT)
        assert daemon.wait_exit() == 0, daemon.text
    assert lines("4 requests not finished: aborted")
    assert lines("tokend stopped; nothing is left running")
