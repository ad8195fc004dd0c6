"""The supervisor over fake processes: requests finish before the daemon ends."""

import signal
import socket
import time

from tests.fakes.supervised import ECHO_SECONDS, Start, assert_nothing_left, eventually


def test_a_first_signal_waits_for_requests(start: Start) -> None:
    daemon = start("api_server=busy")
    url = daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("api 0: received Drain()", "2 requests in flight may finish within 30 s")
    assert "engine 0: received Drain()" not in daemon.text
    port = int(url.rsplit(":", 1)[1])
    socket.create_connection(("127.0.0.1", port)).close()
    children["api_server"].send_signal(signal.SIGUSR2)
    assert daemon.wait_exit() == 0, daemon.text
    assert "aborted\n" not in daemon.text
    assert_nothing_left(daemon, children)


def test_a_second_signal_aborts_them_and_a_third_kills(start: Start) -> None:
    daemon = start("api_server=busy", "worker=stubborn")
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests in flight")
    time.sleep(ECHO_SECONDS)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests not finished: aborted")
    assert eventually(lambda: not children["api_server"].is_running())
    assert children["worker"].is_running()
    time.sleep(ECHO_SECONDS)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 128 + signal.SIGTERM
    assert_nothing_left(daemon, children)


def test_requests_that_take_too_long_are_aborted(start: Start) -> None:
    daemon = start("api_server=busy", "shutdown_timeout=0.2")
    daemon.wait_ready()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0
    assert "2 requests in flight may finish within 0.2 s" in daemon.text
    assert "2 requests not finished: aborted" in daemon.text


def test_a_process_that_dies_during_a_drain_is_restarted(
    start: Start,
) -> None:
    """Open requests need the engine; a new front end boots in the drain state."""
    daemon = start("api_server=busy")
    daemon.wait_ready()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests in flight")
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0 is back after")
    daemon.children()["api_server"].kill()
    assert daemon.wait_exit() == 0, daemon.text
    assert daemon.text.count("api 0: received Drain()") == 2
    assert "aborted\n" not in daemon.text


def test_operators_calls_for_all_front_ends_reach_them(start: Start) -> None:
    daemon = start("api_server=asked_to_abort", "api_server_count=2")
    daemon.wait_ready()
    daemon.children()["api_server"].send_signal(signal.SIGUSR2)
    abort = "received AbortRequests(request_ids=['cmpl-1'], owner='alice')"
    for what in (abort, "received ForgetImages()"):
        daemon.wait_for(f"api 0: {what}", f"api 1: {what}")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text


def test_a_signal_after_a_drain_by_http_counts_as_the_first(
    start: Start,
) -> None:
    """A container runtime sends SIGTERM as soon as the preStop hook returns."""
    daemon = start("api_server=asked_to_drain", "worker=stubborn", "limits=1.5")
    daemon.wait_ready()
    children = daemon.children()
    children["api_server"].send_signal(signal.SIGUSR2)
    assert eventually(lambda: not children["api_server"].is_running())
    assert children["worker"].is_running()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert "api 0: received Drain()" in daemon.text
    assert_nothing_left(daemon, children)
