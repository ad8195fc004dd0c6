"""Injected faults: a request that crashes engines, and an exception in a worker."""

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.chaos.aftermath import assert_unharmed
from tests.e2e.daemon import Daemon, eventually

BODY = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}


def complete(daemon: Daemon, prompt: str = "The sea is") -> httpx.Response:
    body = BODY | {"prompt": prompt}
    return httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=240)


@pytest.mark.suite("daemons")
def test_a_request_that_crashes_every_engine_fails_and_the_next_is_served() -> None:
    """Three engines crash without a suspect, two more while the request runs alone."""
    faults = {"TOKEND_FAULTS": "engine:raise@1x5"}
    with Daemon("--enable-fault-injection", environment=faults) as daemon:
        poison = complete(daemon)
        assert poison.status_code == 500
        assert "crashed 5 times" in poison.json()["error"]["message"]
        assert eventually(lambda: daemon.text.count("engine 0 is back after") == 5)
        assert daemon.metric("tokend:restarts_total") == 5
        assert complete(daemon).status_code == 200


@pytest.mark.suite("daemons")
def test_a_stream_beside_a_request_that_crashes_five_engines_continues() -> None:
    """The stream arrives during the first restart, waits for all isolated runs, and is no suspect.

    Exceptions are injected, since a SIGKILL may precede the report of an isolated run and cost one
    more crash.
    """
    faults = {"TOKEND_FAULTS": "engine:raise@1x5"}
    flags = ("--enable-fault-injection",)
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
def test_an_exception_in_a_worker_is_logged_and_streams_continue() -> None:
    faults = {"TOKEND_FAULTS": "worker:raise@6"}
    flags = ("--enable-fault-injection",)
    with Daemon(*flags, environment=faults) as daemon:
        disturbed, after = complete(daemon), complete(daemon)
        assert disturbed.status_code == after.status_code == 200
        assert disturbed.json()["choices"] == after.json()["choices"]
        assert re.search(r"worker 0 \(pid \d+\) failed with InjectedFaultError", daemon.text)
        assert daemon.text.count("Traceback") == 1


@pytest.mark.suite("chaos")
def test_nan_logits_fail_only_the_requests_of_their_step() -> None:
    """The response of a failed request is an error, never text."""
    faults = {"TOKEND_FAULTS": "worker:nan@16"}
    # Each step computes one token.
    flags = ("--enable-fault-injection", "--speculative-config", '{"method": "none"}')
    with Daemon(*flags, environment=faults) as daemon:
        # The control request takes eight steps, so the fault hits the next request's eighth step.
        with assert_unharmed(daemon):
            broken = complete(daemon)
            assert broken.status_code == 500
            assert "NaN or infinity" in broken.json()["error"]["message"]
            assert complete(daemon).status_code == 200
        assert daemon.metric("vllm:corrupted_requests_total") == 1
        assert daemon.metric("tokend:restarts_total") == 0
