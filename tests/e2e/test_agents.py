"""Jobs of agents at whole daemons: what is kept between turns, and that nothing else changes."""

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.jobs import BLOCK_SIZE, LIMIT_SECONDS, Job, Turn, churn, complete, token_ids

pytestmark = pytest.mark.suite("daemons")

NUM_BLOCKS = 61
"""Of which one is the null block."""
LONG_MS = 600_000
FIRST, MORE = 200, 40
"""Tokens of a job's first prompt and of what each further turn adds."""


def small(*flags: str) -> Daemon:
    return Daemon("--dtype", "float32", "--num-gpu-blocks-override", str(NUM_BLOCKS), *flags)


@pytest.fixture(scope="module")
def pinning() -> Iterator[Daemon]:
    with small("--scheduling-policy", "continuum") as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Daemon]:
    """As it is without pins."""
    with small() as running:
        yield running


def two_turns(daemon: Daemon, name: str, **hint: object) -> tuple[Turn, Turn]:
    """With two pools' worth of other prompts in between."""
    job = Job(daemon, name, dict(hint))
    first = job.turn(FIRST)
    churn(daemon, 2 * NUM_BLOCKS, name)
    return first, job.turn(MORE, is_last_step=True)


@pytest.fixture(scope="module")
def expected(plain: Daemon) -> tuple[Turn, Turn]:
    return two_turns(plain, "fix", ttl_ms=LONG_MS)


def test_a_job_finds_its_prefix_however_the_pool_was_used(
    pinning: Daemon, expected: tuple[Turn, Turn]
) -> None:
    taken = pinning.metric("tokend:pins_taken_total")
    first, second = two_turns(pinning, "fix", ttl_ms=LONG_MS)
    assert (first.tokens, second.tokens) == (expected[0].tokens, expected[1].tokens)
    assert expected[1].num_cached == 0
    whole_blocks = (FIRST + len(first.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.num_cached == whole_blocks
    assert pinning.metric("tokend:pins_taken_total") == taken + 1
    assert pinning.metric("tokend:pins_hit_total") >= 1
    assert eventually(lambda: pinning.metric("tokend:pinned_blocks") == 0)


def test_who_names_no_job_or_says_that_it_is_over_is_not_waited_for(pinning: Daemon) -> None:
    ids = token_ids(FIRST, "nobody")
    first = complete(pinning, ids)
    last = Job(pinning, "over").turn(FIRST, is_last_step=True)
    churn(pinning, 2 * NUM_BLOCKS, "over")
    assert pinning.metric("tokend:pinned_blocks") == 0
    for turn in (first, last):
        assert complete(pinning, [*turn.prompt, *turn.tokens]).num_cached == 0


def test_a_session_is_a_job(pinning: Daemon) -> None:
    """By the header, in a chat, with the times that the daemon finds itself."""
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


def test_jobs_are_timed_from_their_first_arrival_to_their_last_end(pinning: Daemon) -> None:
    before = pinning.metric("tokend:job_completion_seconds_count")
    job = Job(pinning, "timed", {"ttl_ms": LONG_MS})
    for number in range(3):
        job.turn(MORE, is_last_step=number == 2)
    assert eventually(
        lambda: (
            complete(pinning, [200]).tokens
            and pinning.metric("tokend:job_completion_seconds_count") == before + 1
        )
    )
    assert pinning.metric("tokend:job_completion_seconds_sum") > 0


def test_without_pins_nothing_is_kept(expected: tuple[Turn, Turn]) -> None:
    with small("--scheduling-policy", "continuum", "--pin-policy", "none") as daemon:
        first, second = two_turns(daemon, "fix", ttl_ms=LONG_MS)
        assert (first.tokens, second.tokens) == (expected[0].tokens, expected[1].tokens)
        assert second.num_cached == 0
        assert daemon.metric("tokend:pins_taken_total") == 0
