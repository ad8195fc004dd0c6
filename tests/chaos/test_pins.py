"""Agent sessions with false hints, without next turns, or too many; and an engine that dies."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.aftermath import ENGINE, assert_unharmed, control
from tests.e2e.agent_sessions import BLOCK_SIZE, AgentSession, complete, token_ids
from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("chaos")

NUM_BLOCKS = 121
USABLE = NUM_BLOCKS - 1
LONG_MS = 600_000
FLAGS = (
    *("--dtype", "float32", "--num-gpu-blocks-override", str(NUM_BLOCKS)),
    *("--max-prefill-slowdown", "0"),
)
"""Prompts are not spread over the steps, so those of a burst take blocks at the same time."""
PINNED, GIVEN_UP, EXPIRED = (
    *("tokend:pinned_blocks", "tokend:pins_given_up_total", "tokend:pins_expired_total"),
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*FLAGS, "--scheduling-policy", "continuum") as running:
        yield running


def drop_retained_prefixes(daemon: Daemon) -> None:
    """Reset the prefix cache with all retained prefixes."""
    assert httpx.post(f"{daemon.url}/reset_prefix_cache", timeout=30).status_code == 200


def num_pinned_blocks(daemon: Daemon) -> float:
    """Pinned blocks after a step, which updates the metric."""
    control(daemon)
    return daemon.metric(PINNED)


def test_the_prefix_of_a_session_that_never_returns_expires(daemon: Daemon) -> None:
    with assert_unharmed(daemon):
        expired = daemon.metric(EXPIRED)
        for number in range(3):
            AgentSession(daemon, f"gone {number}", {"ttl_ms": 5000}).turn(160)
        assert num_pinned_blocks(daemon) >= 10
        assert eventually(lambda: num_pinned_blocks(daemon) == 0, 30)
        assert daemon.metric(EXPIRED) == expired + 3


def test_false_tool_hints_retain_no_more_than_the_limit(daemon: Daemon) -> None:
    """A quick or an unknown tool without a next turn; and last steps that are not the last."""
    with assert_unharmed(daemon):
        for number in range(40):
            tool = "ls" if number % 2 else f"tool-{number}"
            AgentSession(daemon, f"false hint {number}", {"tool": tool, "ttl_ms": LONG_MS}).turn(
                100
            )
        last_step = AgentSession(daemon, "last step", {"is_last_step": True, "ttl_ms": LONG_MS})
        for _ in range(3):
            last_step.turn(40)
        assert 0 < num_pinned_blocks(daemon) <= USABLE / 2
        assert complete(daemon, token_ids(USABLE * BLOCK_SIZE - 40, "alone")).num_cached == 0
        drop_retained_prefixes(daemon)


def test_retained_prefixes_are_evicted_before_requests_are_preempted(daemon: Daemon) -> None:
    with assert_unharmed(daemon):
        for number in range(4):
            AgentSession(daemon, f"kept {number}", {"ttl_ms": LONG_MS}).turn(200)
        assert num_pinned_blocks(daemon) > USABLE / 4
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
        drop_retained_prefixes(daemon)


def test_more_sessions_than_blocks_are_served(daemon: Daemon) -> None:
    """Concurrent sessions that never return; a real session among them is served."""
    with assert_unharmed(daemon):
        session = AgentSession(daemon, "honest", {"ttl_ms": LONG_MS})
        first = session.turn(60)

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
        assert 0 < num_pinned_blocks(daemon) <= USABLE / 2
        assert session.turn(20, is_last_step=True).prompt[:60] == first.prompt
        drop_retained_prefixes(daemon)


def test_retained_prefixes_end_with_their_engine_and_requests_survive(daemon: Daemon) -> None:
    with assert_unharmed(daemon, {ENGINE}):
        sessions = [
            AgentSession(daemon, f"survivor {each}", {"ttl_ms": LONG_MS}) for each in range(3)
        ]
        for session in sessions:
            session.turn(100)
        assert num_pinned_blocks(daemon) >= 3 * 100 // BLOCK_SIZE
        expected = complete(daemon, [*sessions[0].context, 300, 301], max_tokens=60).tokens

        async def complete_across_a_death() -> list[int]:
            answer = asyncio.create_task(
                asyncio.to_thread(
                    complete,
                    daemon,
                    [*sessions[0].context, 300, 301],
                    max_tokens=60,
                    agent_hint={"job_id": sessions[0].name, "ttl_ms": LONG_MS},
                )
            )
            running = "vllm:num_requests_running"
            assert await asyncio.to_thread(eventually, lambda: daemon.metric(running) > 0)
            os.kill(daemon.processes()["engine_core"].pid, signal.SIGKILL)
            return (await answer).tokens

        assert asyncio.run(complete_across_a_death()) == expected
        assert 0 < daemon.metric(PINNED) <= len(sessions[0].context) // BLOCK_SIZE + 4, (
            "the blocks of one session"
        )
        assert [session.turn(20, is_last_step=True).num_cached for session in sessions[1:]] == [
            0,
            0,
        ]
        assert complete(daemon, [*sessions[0].context, 300, 301], max_tokens=60).tokens == expected
        drop_retained_prefixes(daemon)
