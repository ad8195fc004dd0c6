"""Sessions that lie, never return, or are too many; and an engine that dies with what they pin."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.aftermath import ENGINE, control, unharmed
from tests.e2e.daemon import Daemon, eventually
from tests.e2e.jobs import BLOCK_SIZE, Job, complete, token_ids

pytestmark = pytest.mark.suite("chaos")

NUM_BLOCKS = 121
USABLE = NUM_BLOCKS - 1
LONG_MS = 600_000
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", str(NUM_BLOCKS))
PINNED, GIVEN_UP, EXPIRED = (
    *("tokend:pinned_blocks", "tokend:pins_given_up_total", "tokend:pins_expired_total"),
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*FLAGS, "--scheduling-policy", "continuum") as running:
        yield running


def drop_pins(daemon: Daemon) -> None:
    """A reset forgets what is pinned, so that the next test begins with an empty pool."""
    assert httpx.post(f"{daemon.url}/reset_prefix_cache", timeout=30).status_code == 200


def pinned(daemon: Daemon) -> float:
    """After a step, in which the engine tells of itself."""
    control(daemon)
    return daemon.metric(PINNED)


def test_a_session_that_never_returns_gives_its_blocks_back(daemon: Daemon) -> None:
    with unharmed(daemon):
        expired = daemon.metric(EXPIRED)
        for number in range(3):
            Job(daemon, f"gone {number}", {"ttl_ms": 1500}).turn(160)
        assert pinned(daemon) >= 10
        assert eventually(lambda: pinned(daemon) == 0)
        assert daemon.metric(EXPIRED) == expired + 3


def test_a_client_that_lies_about_its_tools_gets_no_more_than_its_share(daemon: Daemon) -> None:
    """A quick tool, or one that nobody knows, and nobody returns; ends are lies, too."""
    with unharmed(daemon):
        for number in range(40):
            tool = "ls" if number % 2 else f"tool-{number}"
            Job(daemon, f"liar {number}", {"tool": tool, "ttl_ms": LONG_MS}).turn(100)
        over = Job(daemon, "over", {"is_last_step": True, "ttl_ms": LONG_MS})
        for _ in range(3):
            over.turn(40)
        assert 0 < pinned(daemon) <= USABLE / 2
        assert complete(daemon, token_ids(USABLE * BLOCK_SIZE - 40, "alone")).num_cached == 0
        drop_pins(daemon)


def test_pins_go_before_anyone_is_refused_or_preempted(daemon: Daemon) -> None:
    with unharmed(daemon):
        for number in range(4):
            Job(daemon, f"kept {number}", {"ttl_ms": LONG_MS}).turn(200)
        assert pinned(daemon) > USABLE / 4
        preempted = daemon.metric("vllm:num_preemptions_total")
        given_up = daemon.metric(GIVEN_UP)
        prompts = [token_ids(25 * BLOCK_SIZE, f"burst {each}") for each in range(4)]

        async def burst() -> None:
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    group.create_task(asyncio.to_thread(complete, daemon, prompt))

        asyncio.run(burst())
        assert daemon.metric("vllm:num_preemptions_total") == preempted
        assert daemon.metric(GIVEN_UP) > given_up
        drop_pins(daemon)


def test_more_sessions_than_the_pool_has_blocks(daemon: Daemon) -> None:
    """All at once, none returns; a real job among them gets its answers."""
    with unharmed(daemon):
        job = Job(daemon, "honest", {"ttl_ms": LONG_MS})
        first = job.turn(60)

        async def many() -> None:
            limit = asyncio.Semaphore(32)
            async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:

                async def one(number: int) -> None:
                    async with limit:
                        hint = {"job_id": f"many {number}", "ttl_ms": LONG_MS}
                        prompt = token_ids(2 * BLOCK_SIZE, f"many {number}")
                        body = {"prompt": prompt, "max_tokens": 1, "agent_hint": hint}
                        response = await client.post("/v1/completions", json=body)
                        assert response.status_code == 200, response.text

                await asyncio.gather(*(one(each) for each in range(5 * USABLE)))

        asyncio.run(many())
        assert 0 < pinned(daemon) <= USABLE / 2
        assert job.turn(20, is_last_step=True).prompt[:60] == first.prompt
        drop_pins(daemon)


def test_an_engine_that_dies_takes_its_pins_along_and_no_request(daemon: Daemon) -> None:
    with unharmed(daemon, {ENGINE}):
        jobs = [Job(daemon, f"survivor {each}", {"ttl_ms": LONG_MS}) for each in range(3)]
        for job in jobs:
            job.turn(100)
        assert pinned(daemon) >= 3 * 100 // BLOCK_SIZE
        expected = complete(daemon, [*jobs[0].said, 300, 301], max_tokens=60).tokens

        async def die_in_the_middle() -> list[int]:
            answer = asyncio.create_task(
                asyncio.to_thread(
                    complete,
                    daemon,
                    [*jobs[0].said, 300, 301],
                    max_tokens=60,
                    agent_hint={"job_id": jobs[0].name, "ttl_ms": LONG_MS},
                )
            )
            running = "vllm:num_requests_running"
            assert await asyncio.to_thread(eventually, lambda: daemon.metric(running) > 0)
            os.kill(daemon.processes()["engine_core"].pid, signal.SIGKILL)
            return (await answer).tokens

        assert asyncio.run(die_in_the_middle()) == expected
        assert 0 < daemon.metric(PINNED) <= len(jobs[0].said) // BLOCK_SIZE + 4, "those of one job"
        assert [job.turn(20, is_last_step=True).num_cached for job in jobs[1:]] == [0, 0]
        assert complete(daemon, [*jobs[0].said, 300, 301], max_tokens=60).tokens == expected
        drop_pins(daemon)
