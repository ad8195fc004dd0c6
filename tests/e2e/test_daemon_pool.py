"""The reset of a shared daemon finds requests, pauses and dead processes left by a test."""

import httpx
import pytest

from tests.e2e import daemon as shared
from tests.e2e.daemon import Daemon, DaemonPool, reset

pytestmark = pytest.mark.suite("settings")

REQUEST = {"prompt": "word " * 100, "max_tokens": 4, "temperature": 0}


def cached_tokens(daemon: Daemon) -> int:
    answer = httpx.post(f"{daemon.url}/v1/completions", json=REQUEST, timeout=60).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def kill_worker_of_borrowed_daemon(daemons: DaemonPool) -> None:
    with daemons.borrow() as daemon:
        daemon.processes()["worker"].kill()
        assert shared.eventually(lambda: "is back after" in daemon.text, 60)


def test_leftovers_of_a_test_are_found(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SETTLE_SECONDS", 0.5)
    assert [cached_tokens(daemon), cached_tokens(daemon)] == [0, 96]
    reset(daemon)
    assert cached_tokens(daemon) == 0
    endless = REQUEST | {"max_tokens": 6000, "stream": True, "ignore_eos": True}
    url = f"{daemon.url}/v1/completions"
    with httpx.stream("POST", url, json=endless, timeout=60) as response:
        lines = response.iter_lines()  # httpx closes the connection when this iterator is collected
        next(lines)
        with pytest.raises(AssertionError, match="requests are left"):
            reset(daemon)
    httpx.post(f"{daemon.url}/pause", params={"mode": "keep"}).raise_for_status()
    with pytest.raises(AssertionError, match=r"a pause is left|requests are left"):
        reset(daemon)
    httpx.post(f"{daemon.url}/resume").raise_for_status()
    reset(daemon)


def test_daemons_are_shared_by_flags_and_replaced_after_a_failure(daemons: DaemonPool) -> None:
    with daemons.borrow() as first:
        before = first.process_ids()
    with daemons.borrow() as again:
        assert again.process_ids() == before
    with pytest.raises(AssertionError, match="restarted"):
        kill_worker_of_borrowed_daemon(daemons)
    with daemons.borrow() as replaced:
        assert replaced.process_ids().isdisjoint(before)
