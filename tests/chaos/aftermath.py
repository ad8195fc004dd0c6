"""What holds after every fault: the daemon is what it was before."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import httpx

from deploy.bench.processes import GAUGES, IdleState, find_leftovers, pids_by_title
from tests.e2e.daemon import Daemon, eventually

CONTROL = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
ENGINE, WORKER, FRONT_END = "tokend: engine 0", "tokend: worker 0", "tokend: api 0"


def control(daemon: Daemon) -> list[int]:
    """The tokens of a request that anybody may send at any time."""
    response = httpx.post(f"{daemon.url}/v1/completions", json=CONTROL, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def at_rest(daemon: Daemon) -> bool:
    """Nobody runs or waits, and nobody holds a block."""
    return not any(daemon.metric(name) for name in GAUGES)


@contextmanager
def unharmed(daemon: Daemon, restarted: Collection[str] = ()) -> Iterator[None]:
    """The same tokens, gauges, blocks, processes and open descriptors as before.

    restarted: titles of the processes that others have taken the place of.
    """
    answer = control(daemon)
    assert eventually(lambda: at_rest(daemon))
    before, pids = IdleState.of(daemon), pids_by_title(daemon.pid)
    yield
    assert httpx.get(f"{daemon.url}/health").status_code == 200
    assert find_leftovers(before, daemon) == []
    now = pids_by_title(daemon.pid)
    assert {title for title in pids if now[title] != pids[title]} == set(restarted)
    assert control(daemon) == answer
