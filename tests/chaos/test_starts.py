"""A daemon that cannot start: exit status, a one-line reason, and no processes left."""

import shutil
from pathlib import Path

import psutil
import pytest

from deploy.bench.processes import pids_by_title
from tests.chaos.aftermath import ENGINE, FRONT_END, WORKER
from tests.e2e.daemon import Daemon, eventually
from tests.e2e.own_models import save_qwen3
from tests.e2e.reference import packaged_model

pytestmark = pytest.mark.suite("chaos")


def assert_ends(daemon: Daemon, status: int, *, timeout: float = 60.0) -> None:
    assert daemon.wait_exit(timeout) == status, daemon.text
    assert list(daemon.runtime_dir.iterdir()) == []
    assert "Traceback" not in daemon.text


@pytest.mark.parametrize("title", [WORKER, ENGINE, FRONT_END])
def test_a_process_killed_during_the_start_ends_the_daemon_and_is_named(title: str) -> None:
    daemon = Daemon()
    assert eventually(lambda: title in pids_by_title(daemon.pid), 60)
    children = psutil.Process(daemon.pid).children(recursive=True)
    psutil.Process(pids_by_title(daemon.pid)[title]).kill()
    assert_ends(daemon, 1)
    name = title.removeprefix("tokend: ")
    assert f"{name} (pid " in daemon.text
    assert "was killed by SIGKILL while starting" in daemon.text
    assert eventually(lambda: not any(child.is_running() for child in children))


def test_a_truncated_model_file_is_named(tmp_path: Path) -> None:
    source = Path(packaged_model().source)
    half = tmp_path / "half.gguf"
    half.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    daemon = Daemon(str(half))
    assert_ends(daemon, 2)
    assert str(half) in daemon.text.splitlines()[-1]


def test_prepared_weights_that_were_truncated_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    save_qwen3(folder)
    with Daemon(str(folder)):
        pass
    weights = folder / "model.safetensors"
    copy = tmp_path / "copy"
    shutil.copy(weights, copy)
    weights.write_bytes(copy.read_bytes()[: copy.stat().st_size // 2])
    daemon = Daemon(str(folder))
    assert_ends(daemon, 2)
    assert "model.safetensors" in daemon.text.splitlines()[-1]


@pytest.mark.parametrize(
    ("flag", "value"), [("--kv-cache-memory", "100000G"), ("--max-num-seqs", "1000000000")]
)
def test_more_memory_than_available_is_refused(flag: str, value: str) -> None:
    daemon = Daemon(flag, value)
    assert_ends(daemon, 2)
    assert flag in daemon.text.splitlines()[-1]
