"""`tokend ps` and `tokend stop`, with supervisors of fake processes."""

import os
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy import daemons
from deploy.environment import HostEnvironment
from proto.errors import ConfigError
from proto.messages.lifecycle import DaemonState
from proto.runtime.run_directory import RunDirectory, write_state
from tests.fakes.supervised import FakeDaemon, Start, eventually


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostEnvironment:
    """An environment in which run directories are in `tmp_path` only."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return HostEnvironment.of({**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)})


def begin(start: Start, environment: HostEnvironment, *choices: str) -> FakeDaemon:
    daemon = start(*choices, run_parent=Path(environment.variables["XDG_RUNTIME_DIR"]))
    daemon.wait_ready()
    return daemon


def test_running_daemons_are_listed(
    start: Start, environment: HostEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert daemons.ps([], environment) == 0
    assert capsys.readouterr() == ("", "no daemon of this user is running\n")
    daemon = begin(start, environment)
    assert daemons.ps([], environment) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "MODEL", "ADDRESS", "PID", "UPTIME", "REQUESTS", "STATE"]
    name, model, address, pid, *_ = row.split()
    assert (name, model) == ("fake", "smollm2-135m-instruct")
    assert (address, pid) == (daemon.wait_ready(), str(daemon.process.pid))
    # its front ends are fakes, which answer nothing
    assert row.endswith("-         starting, or busy")


def test_a_daemon_with_keys_is_not_asked_without_one(
    environment: HostEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log would have a refusal for each call."""
    paths: list[str] = []
    missing = b""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            body = b'{"ready": true, "reasons": [], "server_load": 3' + missing + b"}"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    directory = RunDirectory.create(str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        write_state(directory.path, DaemonState(os.getpid(), url, "m", "s", needs_key=True))
        assert daemons.ps([], environment) == 0
        printed = capsys.readouterr()
        assert printed.out.splitlines()[1].endswith("-         ready")
        assert "set TOKEND_API_KEY" in printed.err
        assert paths == ["/health/ready"]
        with_key = replace(environment, settings={"api_key": "k"})
        assert daemons.ps([], with_key) == 0
        printed = capsys.readouterr()
        assert printed.out.splitlines()[1].endswith("3         ready")
        assert printed.err == ""
        missing = b', "missing_engines": {"1": ["worker 1 rests for 9 s"], "2": []}'
        assert daemons.ps([], with_key) == 0
        row = capsys.readouterr().out.splitlines()[1]
        assert row.endswith("ready; engine 1: worker 1 rests for 9 s; engine 2: missing")
        for numbers, shown in (
            (b'{"engine": 1, "worker": 0}', "1 engine"),
            (b'{"engine": 1, "worker": 2}', "1 engine, 2 worker"),
            (b'{"engine": 0, "worker": 0}', "none yet"),
        ):
            missing = b', "standby": ' + numbers
            assert daemons.ps([], with_key) == 0
            row = capsys.readouterr().out.splitlines()[1]
            assert row.endswith(f"ready; on standby: {shown}")
        server.shutdown()
    directory.leave()


@pytest.mark.parametrize("by", ["pid", "port", "url", "name", "source", "nothing"])
def test_a_daemon_is_stopped_by_a_drain(
    start: Start, environment: HostEnvironment, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    daemon = begin(start, environment)
    url = daemon.wait_ready()
    words = {
        "pid": [str(daemon.process.pid)],
        "port": [url.rpartition(":")[2]],
        "url": [f"{url}/"],
        "name": ["fake"],
        "source": ["smollm2-135m-instruct"],
        "nothing": [],
    }
    assert daemons.stop(words[by], environment) == 0
    assert daemon.process.wait(10) == 0
    assert f"stopped {daemon.process.pid}" in capsys.readouterr().out


def test_of_several_daemons_one_must_be_named(start: Start, environment: HostEnvironment) -> None:
    first, second = begin(start, environment), begin(start, environment)
    for words in ([], ["fake"]):
        with pytest.raises(ConfigError, match="select one by its process id or port: ") as caught:
            daemons.stop(words, environment)
        assert f"{first.process.pid} (fake at {first.wait_ready()})" in str(caught.value)
    with pytest.raises(ConfigError, match="no daemon of this user is 1; there are: "):
        daemons.stop(["1"], environment)
    assert daemons.stop([str(second.process.pid)], environment) == 0
    assert first.process.poll() is None
    assert daemons.stop(["--all"], environment) == 0
    assert eventually(lambda: first.process.poll() == 0)


@pytest.mark.parametrize("words", [["a", "b"], ["--force"], []])
def test_wrong_arguments_and_no_daemon(words: list[str], environment: HostEnvironment) -> None:
    with pytest.raises(ConfigError):
        daemons.stop(words, environment)


def test_a_daemon_in_another_folder_is_found(
    environment: HostEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that was started without XDG_RUNTIME_DIR."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    directory = RunDirectory.create(str(elsewhere))
    try:
        write_state(directory.path, DaemonState(os.getpid(), "http://127.0.0.1:1", "m", "s"))
        (found,) = daemons.running_daemons(environment.run_parents())
        assert found.state.model == "m"
    finally:
        directory.leave()


def test_the_state_of_another_user_is_not_read(
    environment: HostEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could name any process, which `tokend stop` would end."""
    directory = RunDirectory.create(str(tmp_path))
    try:
        write_state(directory.path, DaemonState(os.getpid(), "http://127.0.0.1:1", "m", "s"))
        assert daemons.running_daemons([str(tmp_path)])
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        assert daemons.running_daemons([str(tmp_path)]) == []
    finally:
        directory.leave()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(9.9, "9 s"), (60, "1 min"), (3 * 3600 + 1300, "3 h 21 min"), (2 * 86400 + 9000, "2 d 2 h")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert daemons._duration(seconds) == expected
