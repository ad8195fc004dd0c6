"""Faults that are injected: a request that kills everything, and an exception in a worker."""

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.chaos.aftermath import unharmed
from tests.e2e.daemon import Daemon, eventually

BODY = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}


def complete(daemon: Daemon, prompt: str = "The sea is") -> httpx.Response:
    body = BODY | {"prompt": prompt}
    return httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=240)


@pytest.mark.suite("daemons")
def test_a_request_that_kills_every_engine_is_given_up_and_the_next_one_served() -> None:
    """Three engines die of it with no suspicion, two more while nothing else runs."""
    faults = {"TOKEND_FAULTS": "engine:raise@1x5"}
    with Daemon("--enable-fault-injection", environment=faults) as daemon:
        poison = complete(daemon)
        assert poison.status_code == 500
        assert "crashed 5 times" in poison.json()["error"]["message"]
        assert eventually(lambda: daemon.text.count("engine 0: is back after") == 5)
        assert daemon.metric("tokend:restarts_total") == 5
        assert complete(daemon).status_code == 200


@pytest.mark.suite("daemons")
def test_a_stream_beside_a_request_that_kills_five_engines_goes_on() -> None:
    """It comes while the first of them is dead, waits for all trials, and is no suspect itself.

    Exceptions, since a SIGKILL may come before the word of a trial is out, which costs one more.
    """
    faults = {"TOKEND_FAULTS": "engine:raise@1x5"}
    flags = ("--enable-fault-injection", "--dtype", "float32")
    with Daemon(*flags, environment=faults) as daemon, ThreadPoolExecutor() as pool:
        poison = pool.submit(complete, daemon)
        assert eventually(lambda: "it is restarted" in daemon.text, 60)
        innocent = pool.submit(complete, daemon, "Once upon a time")
        assert poison.result().status_code == 500
        assert "crashed 5 times" in poison.result().json()["error"]["message"]
        assert innocent.result().status_code == 200
        again = complete(daemon, "Once upon a time")
        assert innocent.result().json()["choices"] == again.json()["choices"]
        assert daemon.metric("tokend:restarts_total") == 5


@pytest.mark.suite("chaos")
def test_an_exception_in_a_worker_is_shown_and_nobody_else_notices() -> None:
    faults = {"TOKEND_FAULTS": "worker:raise@6"}
    flags = ("--enable-fault-injection", "--dtype", "float32")
    with Daemon(*flags, environment=faults) as daemon:
        disturbed, after = complete(daemon), complete(daemon)
        assert disturbed.status_code == after.status_code == 200
        assert disturbed.json()["choices"] == after.json()["choices"]
        assert re.search(r"worker 0: \(pid \d+\) failed with InjectedFaultError", daemon.text)
        assert daemon.text.count("Traceback") == 1


@pytest.mark.suite("chaos")
def test_numbers_that_are_none_fail_the_requests_of_their_step_and_no_others() -> None:
    """The answer to the one that fails is an error, never text."""
    faults = {"TOKEND_FAULTS": "worker:nan@16"}
    flags = ("--enable-fault-injection", "--dtype", "float32")
    with Daemon(*flags, environment=faults) as daemon:
        with unharmed(daemon):  # eight steps, so that the broken one is the eighth of the next
            broken = complete(daemon)
            assert broken.status_code == 500
            assert "NaN or infinity" in broken.json()["error"]["message"]
            assert complete(daemon).status_code == 200
        assert daemon.metric("vllm:corrupted_requests_total") == 1
        assert daemon.metric("tokend:restarts_total") == 0
