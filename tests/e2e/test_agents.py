"""Agent sessions at real daemons: retained prefixes between turns, and unchanged results."""

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.agent_sessions import (
    BLOCK_SIZE,
    LIMIT_SECONDS,
    AgentSession,
    Turn,
    complete,
    fill_cache,
    token_ids,
)
from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("daemons")

NUM_BLOCKS = 61
"""Including the null block."""
LONG_MS = 600_000
FIRST, MORE = 200, 40
"""Tokens of a session's first prompt and of every further turn."""


def small_daemon(*flags: str) -> Daemon:
    return Daemon("--num-gpu-blocks-override", str(NUM_BLOCKS), *flags)


@pytest.fixture(scope="module")
def pinning() -> Iterator[Daemon]:
    with small_daemon("--scheduling-policy", "continuum") as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Daemon]:
    """A daemon without retained prefixes."""
    with small_daemon() as running:
        yield running


def two_turns(daemon: Daemon, name: str, **hint: object) -> tuple[Turn, Turn]:
    """Two turns with other prompts of twice the pool's size in between."""
    session = AgentSession(daemon, name, dict(hint))
    first = session.turn(FIRST)
    fill_cache(daemon, 2 * NUM_BLOCKS, name)
    return first, session.turn(MORE, is_last_step=True)


@pytest.fixture(scope="module")
def expected(plain: Daemon) -> tuple[Turn, Turn]:
    return two_turns(plain, "fix", ttl_ms=LONG_MS)


def test_a_session_finds_its_prefix_after_other_load(
    pinning: Daemon, expected: tuple[Turn, Turn]
) -> None:
    num_pins = pinning.metric("tokend:pins_taken_total")
    first, second = two_turns(pinning, "fix", ttl_ms=LONG_MS)
    assert (first.tokens, second.tokens) == (expected[0].tokens, expected[1].tokens)
    assert expected[1].num_cached == 0
    whole_blocks = (FIRST + len(first.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.num_cached == whole_blocks
    assert pinning.metric("tokend:pins_taken_total") == num_pins + 1
    assert pinning.metric("tokend:pins_hit_total") >= 1
    assert eventually(lambda: pinning.metric("tokend:pinned_blocks") == 0)


def test_requests_without_a_session_and_last_steps_retain_nothing(pinning: Daemon) -> None:
    ids = token_ids(FIRST, "no session")
    first = complete(pinning, ids)
    last = AgentSession(pinning, "last").turn(FIRST, is_last_step=True)
    fill_cache(pinning, 2 * NUM_BLOCKS, "last")
    assert pinning.metric("tokend:pinned_blocks") == 0
    for turn in (first, last):
        assert complete(pinning, [*turn.prompt, *turn.tokens]).num_cached == 0


def test_the_session_header_names_an_agent_session(pinning: Daemon) -> None:
    """In a chat, with tool times measured by the daemon itself."""
    messages = [{"role": "user", "content": "Say which files there are. " * 20}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    before = pinning.metric("tokend:tool_duration_seconds_count")
    for _ in range(2):
        response = httpx.post(
            f"{pinning.url}/v1/chat/completions",
            json=body,
            headers={"X-Session-ID": "someone"},
            timeout=LIMIT_SECONDS,
        )
        assert response.status_code == 200, response.text
        messages.append(response.json()["choices"][0]["message"] | {"refusal": None})
        messages.append({"role": "user", "content": "And then?"})
    assert eventually(
        lambda: (
            complete(pinning, [200]).tokens
            and pinning.metric("tokend:tool_duration_seconds_count") == before + 1
        )
    )


def test_agent_sessions_are_timed_from_first_arrival_to_last_finish(pinning: Daemon) -> None:
    before = pinning.metric("tokend:job_completion_seconds_count")
    session = AgentSession(pinning, "timed", {"ttl_ms": LONG_MS})
    for number in range(3):
        session.turn(MORE, is_last_step=number == 2)
    assert eventually(
        lambda: (
            complete(pinning, [200]).tokens
            and pinning.metric("tokend:job_completion_seconds_count") == before + 1
        )
    )
    assert pinning.metric("tokend:job_completion_seconds_sum") > 0


@pytest.mark.suite("settings")
def test_pin_policy_none_retains_nothing(expected: tuple[Turn, Turn]) -> None:
    with small_daemon("--scheduling-policy", "continuum", "--pin-policy", "none") as daemon:
        first, second = two_turns(daemon, "fix", ttl_ms=LONG_MS)
        assert (first.tokens, second.tokens) == (expected[0].tokens, expected[1].tokens)
        assert second.num_cached == 0
        assert daemon.metric("tokend:pins_taken_total") == 0
