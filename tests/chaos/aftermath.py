"""Checks after every fault: the daemon's state and outputs are the same as before."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import httpx

from deploy.bench.processes import GAUGES, IdleState, find_leftovers, pids_by_title
from tests.e2e.daemon import Daemon, eventually

CONTROL = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
ENGINE, WORKER, FRONT_END = "tokend: engine 0", "tokend: worker 0", "tokend: api 0"


def control(daemon: Daemon) -> list[int]:
    """The tokens of a control request."""
    response = httpx.post(f"{daemon.url}/v1/completions", json=CONTROL, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def is_idle(daemon: Daemon) -> bool:
    """No request runs or waits, and no block is referenced."""
    return not any(daemon.metric(name) for name in GAUGES)


@contextmanager
def assert_unharmed(daemon: Daemon, restarted: Collection[str] = ()) -> Iterator[None]:
    """Assert that tokens, gauges, blocks, processes and open descriptors are as before the block.

    restarted: titles of the processes that must have been replaced.
    """
    answer = control(daemon)
    assert eventually(lambda: is_idle(daemon))
    before, pids = IdleState.settled(daemon), pids_by_title(daemon.pid)
    yield
    assert httpx.get(f"{daemon.url}/health").status_code == 200
    leftovers = find_leftovers(before, daemon)
    assert not leftovers, leftovers
    now = pids_by_title(daemon.pid)
    assert {title for title in pids if now[title] != pids[title]} == set(restarted)
    assert control(daemon) == answer
