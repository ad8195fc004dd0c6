"""Servers started by a command, and the measurement of their start."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from deploy import cli
from deploy.bench import startup
from deploy.bench.servers import PrintedLine, ServerSpec, StartedServer, running
from proto.errors import ConfigError, TokendError
from tests.fakes.openai_server import fake_openai
from tests.fakes.supervised import eventually

FAKE = f"{sys.executable} -m tests.fakes.openai_program {{port}}"


def spec(command: str = FAKE, seconds: float = 60.0) -> ServerSpec:
    return ServerSpec.parse(f"fake={command}", "/health", seconds)


def test_a_server_runs_until_the_context_ends() -> None:
    with StartedServer(spec()) as server:
        pid = server._process.pid
        assert eventually(lambda: server.lines)  # it may answer before its output is read
        assert server.lines[0].text == "fake 0: loading weights …"
        assert 0 < server.lines[0].seconds < server.seconds_to_ready + 5.0
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


@pytest.mark.parametrize(
    ("number", "server"),
    [(signal.SIGTERM, FAKE), (signal.SIGHUP, "sh -c 'sleep 1000; : {port}'")],
    ids=["SIGTERM under load", "SIGHUP during a start"],
)
def test_a_benchmark_that_a_signal_ends_leaves_no_server(
    tmp_path: Path, number: signal.Signals, server: str
) -> None:
    noted = tmp_path / "pid"
    command = f"sh -c 'echo $$ > {noted}; exec \"$@\"' sh {server}"
    with fake_openai() as other:
        words = ["--server", f"a={command}", "--server", f"b={other.url}", "--warm-ups", "0"]
        bench = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "bench", "compare", *words, "--rounds", "9999"],
            preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
        )
        if server == FAKE:
            assert eventually(lambda: bool(other.seen))
        assert eventually(lambda: noted.exists() and noted.read_text().endswith("\n"))
        bench.send_signal(number)
        assert bench.wait(30) == 128 + number
    assert _num_running(int(noted.read_text())) == 0


def test_a_benchmark_that_signals_end_leaves_no_caches(tmp_path: Path) -> None:
    """Nor if more of them arrive while it ends its servers."""
    fills = 'mkdir "$XDG_CACHE_HOME" && touch "$XDG_CACHE_HOME/x"'
    server = f"tokend=sh -c '{fills}; exec \"$@\"' sh {FAKE}"
    bench = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.benchmarks.sizes", "--synthetic", "1b"),
            *("--server", server, "--rounds", "9999"),
        ],
        env={**os.environ, "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert eventually(lambda: list(tmp_path.glob("tokend-compare-*/0/x")))
    while bench.poll() is None:
        bench.terminate()
    assert list(tmp_path.iterdir()) == []


def test_orphans_of_a_server_are_ended_with_it() -> None:
    with StartedServer(spec(f"sh -c 'sleep 1000 & exec {FAKE}'")) as server:
        pid = server._process.pid
        os.killpg(pid, 0)
    assert eventually(lambda: _num_running(pid) == 0)


def _num_running(group: int) -> int:
    """Return the running processes of a group; a killed one may take a moment to end."""
    number = 0
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, its_group, *_ = each.read_text().rpartition(")")[2].split()
            number += its_group == str(group) and state != "Z"
    return number


@pytest.mark.parametrize(
    ("command", "seconds", "expected"),
    [
        (
            f"{FAKE} refuse",
            60.0,
            "fake did not start:\nfake 0: loading weights …\nthere is no model",
        ),
        (f"{sys.executable} -c 'input()' {{port}}", 60.0, "fake did not start"),
        (f"{sys.executable} -c 'import time; time.sleep(99)' {{port}}", 0.05, "fake is not ready"),
    ],
)
def test_a_server_that_fails_to_start_reports_its_output(
    command: str, seconds: float, expected: str
) -> None:
    with pytest.raises(TokendError) as caught, running(spec(command, seconds)):
        pytest.fail("it is up")
    assert expected in str(caught.value)


def test_a_missing_program_is_reported() -> None:
    with (
        pytest.raises(ConfigError, match="/nowhere/serve: No such file"),
        running(spec("/nowhere/serve {port}")),
    ):
        pytest.fail("it is up")


def test_a_running_server_is_not_ended() -> None:
    with running(ServerSpec.parse("a=http://127.0.0.1:9/v1", "/health", 1.0)) as server:
        assert (server.url, server.pid) == ("http://127.0.0.1:9", 0)


def test_start_phases_are_parsed_from_the_output() -> None:
    lines = [
        PrintedLine(0.1, "tokend: starting smollm2 …"),
        PrintedLine(0.5, "worker 0: loading weights …"),
        PrintedLine(0.9, "worker 0: loading weights …"),
        PrintedLine(1.5, "start: imports 0.25 s, weights 1.5 s; first step: 3 s"),
        PrintedLine(1.6, "tokend is ready: x at http://127.0.0.1:1 after 1.6 s"),
        PrintedLine(
            1.6,
            "  start     1.60 s: command 0.20 s; worker 0: imports 0.75 s, weights 0.50 s; "
            "engine 0: workers' weights 1.25 s, KV cache and warm-up 0.10 s",
        ),
    ]
    assert startup.phases(lines) == {
        "tokend: starting smollm2, at": 0.1,
        "worker 0: loading weights, at": 0.5,
        "imports": 0.25,
        "weights": 1.5,
        "first step": 3.0,
        "command": 0.2,
        "worker 0: imports": 0.75,
        "worker 0: weights": 0.5,
        "engine 0: workers' weights": 1.25,
        "engine 0: KV cache and warm-up": 0.1,
    }


@pytest.mark.suite("bench")
def test_starts_alternate_between_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "tokend", lambda name, flags, seconds: spec())
    file = tmp_path / "starts.json"
    words = ["startup", "--rounds", "2", "--server", f"peer={FAKE}", "--json", str(file)]
    assert cli.main(["bench", *words]) == 0
    servers = json.loads(file.read_text())["servers"]
    assert set(servers) == {"fake", "peer"}
    for each in servers.values():
        assert len(each["ready_s"]) == len(each["first_token_s"]) == 2
        for ready, token in zip(each["ready_s"], each["first_token_s"], strict=True):
            assert 0 < ready < token
        assert each["phases_s"]["weights"] == [1.5, 1.5]
    assert "first token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--server", "x=http://127.0.0.1:1"], "from its command"),
        (["--server", "tokend=serve {port}"], "the name is taken"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_usage_errors_are_reported(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        startup.main(words)
