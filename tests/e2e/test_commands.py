"""Commands beside `tokend serve`: a chat in a pipe and in a terminal, ps, models of a hub."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.environment import HostEnvironment
from deploy.models import catalogue
from tests.e2e.daemon import TOKEND, Daemon
from tests.fakes.hub_server import HubServer, Repository

pytestmark = pytest.mark.suite("daemons")

SYSTEM = "Answer with the word Paris."


def variables(daemon: Daemon | None, folder: Path, **more: str) -> dict[str, str]:
    """Return variables with which a command finds this daemon and no other one."""
    runtime = str(daemon.runtime_dir) if daemon is not None else str(folder)
    return {**os.environ, "XDG_RUNTIME_DIR": runtime, "TMPDIR": runtime, **more}


def run(daemon: Daemon | None, folder: Path, *words: str, **more: str) -> str:
    """Run a command that succeeds, and return what it prints."""
    done = subprocess.run(
        [*TOKEND, *words],
        env=variables(daemon, folder, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_question_in_a_pipe(daemon: Daemon, tmp_path: Path) -> None:
    for target in ([], [daemon.url], [str(daemon.pid)], ["smollm2-135m-instruct"]):
        done = subprocess.run(
            [*TOKEND, "chat", *target, "--system", SYSTEM, "--max-tokens", "5"],
            input="What is the capital of France?\n",
            env=variables(daemon, tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip()
        assert done.stderr in ("", "\n(cut after 5 tokens, see --max-tokens)\n")


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, daemon: Daemon, folder: Path, *words: str) -> None:
        self.master, slave = os.openpty()
        self.process = subprocess.Popen(
            [*TOKEND, "chat", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=variables(daemon, folder, TERM="dumb"),
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # Ctrl-C reaches it
        )
        os.close(slave)
        self.text = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.master, 4096):
                with self._changed:
                    self.text += data.decode(errors="replace").replace("\r", "")
                    self._changed.notify_all()

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """Wait until the output so far ends with a pattern, and return and forget the output."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: re.search(pattern + r"\Z", self.text, re.DOTALL), seconds
            )
            assert done, f"no {pattern!r} at the end of:\n{self.text}"
            text, self.text = self.text, ""
        return text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def leave(self, text: str) -> None:
        """Type what ends the chat, and wait for its end."""
        self.type(text)
        assert self.process.wait(20) == 0
        os.close(self.master)

    def interrupt(self) -> str:
        """Type Ctrl-C, and return what is printed until the next prompt.

        Up to three times: Python's input() does not see a signal that comes just before it waits.
        """
        for _ in range(2):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for(">>> ", 5)
        self.type("\x03")
        return self.wait_for(">>> ")

    def ask(self, text: str) -> str:
        """Type a line, and return what is printed until the next prompt."""
        self.type(text + "\n")
        return self.wait_for(">>> ").partition("\n")[2].removesuffix(">>> ").strip()


def test_a_chat_in_a_terminal(daemon: Daemon, tmp_path: Path) -> None:
    terminal = Terminal(daemon, tmp_path, "--max-tokens", "12")
    assert "smollm2-135m-instruct: /help lists the commands" in terminal.wait_for(">>> ")
    assert terminal.ask("/sytem x") == "unknown command /sytem; did you mean /system?"
    assert terminal.ask(f"/system {SYSTEM}") == f"system message: {SYSTEM}"
    assert "forget the conversation" in terminal.ask("/help")
    assert terminal.ask("What is the capital of France?")
    terminal.type('"""one line\n')
    terminal.wait_for(r"\.\.\. ")
    assert terminal.ask('and another"""')
    assert terminal.ask("/clear") == "the conversation is forgotten"
    assert "/exit or Ctrl-D leaves" in terminal.interrupt()
    terminal.leave("/exit\n")


def test_ctrl_c_stops_an_answer_in_the_daemon_too(daemon: Daemon, tmp_path: Path) -> None:
    terminal = Terminal(daemon, tmp_path, "--max-tokens", "6000")
    terminal.wait_for(">>> ")
    for _ in range(10):  # an answer may have ended before Ctrl-C
        terminal.type("Tell a long story.\n")
        terminal.wait_for(r"story\..+\w{2}.*")
        if "(stopped)" in terminal.interrupt():
            break
    else:
        raise AssertionError("no answer was stopped")
    deadline = time.monotonic() + 10
    while httpx.get(f"{daemon.url}/load").json()["server_load"]:
        assert time.monotonic() < deadline, "the request goes on"
        time.sleep(0.02)
    assert terminal.ask("/clear") == "the conversation is forgotten"
    terminal.leave("\x04")


def test_a_running_daemon_and_its_requests_are_listed(daemon: Daemon, tmp_path: Path) -> None:
    body = {"prompt": "One,", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=60) as response:
        pieces = response.iter_bytes()
        next(pieces)
        _, row = run(daemon, tmp_path, "ps").splitlines()
    model = "smollm2-135m-instruct"
    assert re.fullmatch(
        rf"{model} +{model} +{daemon.url} +{daemon.pid} +\d+ (s|min) +1 +ready", row
    ), row


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


@pytest.mark.suite("settings")
def test_a_model_of_the_hub_is_served_listed_stopped_and_removed(
    hub: HubServer, tmp_path: Path
) -> None:
    """The file of the packaged model, as one of two in a repository."""
    packaged = catalogue.MODELS[0]
    weights = Path(catalogue.file_path(packaged, HostEnvironment.of(os.environ).cache))
    files = {"small-Q4_1.gguf": weights.read_bytes(), "small-Q8_0.gguf": b"not needed"}
    hub.repositories["org/small-GGUF"] = Repository(files, is_gated=True, readers=("hf_good",))
    name = "org/small-GGUF:Q4_1"
    own = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.url,
    }
    refused = subprocess.run(
        [*TOKEND, "pull", name],
        env=variables(None, tmp_path, **own),
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert f"{name} is gated: ask for access at {hub.url}/org/small-GGUF" in refused.stderr
    daemon = Daemon(name, "--hf-token", "hf_good", environment=own)
    with daemon:
        models = httpx.get(f"{daemon.url}/v1/models").json()
        assert [model["id"] for model in models["data"]] == [name]
        body = {"model": name, "prompt": "The capital of France is", "max_tokens": 4}
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        shown = httpx.get(f"{daemon.url}/server_info").text
        command = Path(f"/proc/{daemon.pid}/cmdline").read_text()
        assert "hf_good" not in shown + command + daemon.text
        in_use = subprocess.run(
            [*TOKEND, "rm", "org/small-GGUF"],
            env=variables(daemon, tmp_path, **own),
            text=True,
            capture_output=True,
        )
        assert f"is served by {daemon.pid}" in in_use.stderr
        assert f"stopped {daemon.pid}" in run(daemon, tmp_path, "stop", name)
        assert daemon.wait_exit() == 0
    assert "pull" not in daemon.text
    _, row = run(None, tmp_path, "list", **own).splitlines()
    assert re.fullmatch(r"org/small-GGUF +98\.4 MB +GGUF Q4_1 +\d{4}-\d\d-\d\d \d\d:\d\d", row)
    assert run(None, tmp_path, "rm", name, **own) == f"removed {name}: 98.4 MB\n"
    assert run(None, tmp_path, "list", **own) == ""
    left = [each for each in (tmp_path / "hf").rglob("*") if each.is_file()]
    assert sum(each.stat().st_size for each in left) < 10_000
    assert not list((tmp_path / "cache/tokend/prepared").iterdir())


@pytest.mark.suite("settings")
def test_a_chat_starts_a_daemon_and_ends_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*TOKEND, "chat", "--max-tokens", "5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables(None, tmp_path),
        text=True,
    )
    output, errors = process.communicate("Hello.", timeout=120)
    assert process.returncode == 0, errors
    assert output.strip()
    assert errors in ("", "\n(cut after 5 tokens, see --max-tokens)\n")
    assert list(tmp_path.iterdir()) == [], "no daemon is left, and nothing of torch"


@pytest.mark.suite("settings")
def test_ctrl_c_ends_a_plan_without_a_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*TOKEND, "plan"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables(None, tmp_path),
        text=True,
        process_group=0,
    )
    deadline = time.monotonic() + 60
    while not is_planning(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "")


def is_planning(pid: int) -> bool:
    """Whether the process that plans has imported torch."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(
            "worker.commands.plan" in child.cmdline() and child.memory_info().rss > 200 << 20
            for child in psutil.Process(pid).children()
        )
    return False
