"""Grammars that would crash or block the engine end a process of the sandbox instead."""

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from select import select

import psutil
import pytest

from engine_core.structured_output.matchers import (
    CompilerFailedError,
    GrammarError,
    GrammarTimeoutError,
)
from engine_core.structured_output.sandbox import MAX_MEMORY, GrammarSandbox, SandboxSetup
from proto.messages.grammar import GrammarSource
from tests.fakes.toy_vocabulary import EOS, SIZE

RULES = 4000
DEEP = GrammarSource(
    "grammar",
    "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(RULES)) + f'\nr{RULES}: "a"',
)
ENDLESS = GrammarSource(
    "json_schema",
    '{"allOf": [{"type": "integer", "multipleOf": 999983}, '
    '{"type": "integer", "multipleOf": 999979}, {"multipleOf": 777777}]}',
)
LARGE = GrammarSource(
    "json_schema",
    json.dumps({"properties": {f"p{number}": {"type": "string"} for number in range(1_000)}}),
)
SMALL = GrammarSource("regex", "a+")
LIMIT_SECONDS = 20.0


@pytest.fixture
def start_sandbox(tokenizer_folder):
    """Return a function that starts sandboxes; they leave no process behind."""
    sandboxes, before = [], set(psutil.Process().children())

    def start(max_memory=MAX_MEMORY, **fields):
        tokenizer_json = str(tokenizer_folder / "tokenizer.json")
        setup = SandboxSetup(tokenizer_json, SIZE, (EOS,), max_memory)
        sandbox = GrammarSandbox(setup, **fields)
        sandboxes.append(sandbox)
        sandbox.check(SMALL, 1.0)
        return sandbox

    yield start
    for sandbox in sandboxes:
        sandbox.close()
    assert set(psutil.Process().children()) == before


def server_of(sandbox):
    return psutil.Process(sandbox._process.pid)


def end_server_of(sandbox, number):
    """Send a signal to the fork server, which is returned once it has died."""
    server = server_of(sandbox)
    server.send_signal(number)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    return server


def busy_child_of(sandbox):
    """Wait until a process compiles a grammar, and return it."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        for child in server_of(sandbox).children():
            if child.cpu_times().user > 0.1:
                return child
        time.sleep(0.01)
    raise AssertionError("no grammar is being compiled")


def test_neither_a_full_stack_nor_an_endless_compilation_harms_the_engine(start_sandbox):
    sandbox = start_sandbox()
    server = server_of(sandbox)
    for source, error, words in (
        (DEEP, GrammarError, "takes too much memory"),
        (ENDLESS, GrammarTimeoutError, "takes more than 0.2 seconds"),
        (GrammarSource("regex", "("), GrammarError, "unclosed group"),
    ):
        with pytest.raises(error, match=words):
            sandbox.check(source, 0.2)
        sandbox.check(SMALL, 1.0)
    assert server_of(sandbox) == server, "a grammar ended more than its own process"


def test_a_grammar_has_little_memory_and_its_size_is_known(start_sandbox):
    sandbox, narrow = start_sandbox(), start_sandbox(max_memory=1 << 20)
    assert sandbox.check(SMALL, 1.0) < 1 << 20 < sandbox.check(LARGE, 20.0)
    with pytest.raises(GrammarError, match="takes too much memory"):
        narrow.check(LARGE, 20.0)
    narrow.check(SMALL, 1.0)
    for number in range(10):  # of which each leaves memory behind
        sandbox.check(GrammarSource(LARGE.kind, f"{LARGE.source} {' ' * number}"), 20.0)
    for child in server_of(sandbox).children():
        assert child.memory_info().rss - server_of(sandbox).memory_info().rss < 64 << 20


def test_a_process_compiles_many_grammars(start_sandbox):
    """It gets the next one after it has reported that it is idle, so there may be a few."""
    sandbox = start_sandbox()
    for number in range(50):
        sandbox.check(GrammarSource("regex", f"a{number}"), 1.0)
    assert len(server_of(sandbox).children()) <= 5


def test_grammars_are_compiled_at_the_same_time(start_sandbox):
    sandbox = start_sandbox()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(sandbox.check, ENDLESS, LIMIT_SECONDS)
        child = busy_child_of(sandbox)
        sandbox.check(SMALL, 1.0)
        assert not slow.done()
        child.kill()
        assert isinstance(slow.exception(LIMIT_SECONDS), CompilerFailedError)


def test_a_process_that_hangs_is_killed_and_says_nothing_about_its_grammar(start_sandbox):
    sandbox = start_sandbox(hang_seconds=2.0)
    stopped = server_of(sandbox)
    stopped.suspend()
    with pytest.raises(CompilerFailedError, match="hung or was killed"):
        sandbox.check(SMALL, 1.0)
    assert not stopped.is_running()
    sandbox.check(SMALL, 1.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_died_idle_is_replaced(start_sandbox, number):
    sandbox = start_sandbox()
    died = end_server_of(sandbox, number)
    sandbox.check(SMALL, 1.0)
    assert server_of(sandbox) != died


@pytest.mark.parametrize("is_killed", [False, True])
def test_nothing_outlives_the_engine(start_sandbox, is_killed):
    """Whether it closes the sandbox, which waits for no grammar, or is killed."""
    sandbox = start_sandbox()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(sandbox.check, ENDLESS, LIMIT_SECONDS)
        pidfds = [os.pidfd_open(one.pid) for one in (busy_child_of(sandbox), server_of(sandbox))]
        if is_killed:
            sandbox._control.shutdown(socket.SHUT_RDWR)
        else:
            sandbox.close()
        assert isinstance(slow.exception(LIMIT_SECONDS), CompilerFailedError)
    for pidfd in pidfds:
        assert select([pidfd], [], [], LIMIT_SECONDS)[0], "a process still runs"
        os.close(pidfd)


def test_a_closed_sandbox_starts_no_process(start_sandbox):
    sandbox = start_sandbox()
    sandbox.close()
    with pytest.raises(CompilerFailedError):
        sandbox.check(SMALL, 1.0)


def test_a_sandbox_that_cannot_start_raises(tmp_path):
    sandbox = GrammarSandbox(SandboxSetup(str(tmp_path / "tokenizer.json"), SIZE, (EOS,)))
    with pytest.raises(CompilerFailedError, match="does not start"):
        sandbox.check(SMALL, 1.0)


def test_a_process_that_dies_while_it_starts_is_replaced(start_sandbox):
    sandbox = start_sandbox()
    seen = {*psutil.Process().children(), end_server_of(sandbox, signal.SIGKILL)}
    killed = None
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(sandbox.check, SMALL, 1.0)
        while not checked.done():
            starting = set(psutil.Process().children()) - seen
            if starting and killed is None:
                killed = starting.pop()
                killed.kill()
        checked.result()
    assert killed is not None
    assert server_of(sandbox) != killed
