"""`tokend plan org/name` reads headers only, and plans as for the whole files."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import TOKEND
from tests.e2e.own_models import save_qwen3
from tests.fakes.hub_server import HubServer, Repository
from tests.fakes.tiny_families import save_gguf

pytestmark = pytest.mark.suite("settings")


@pytest.fixture
def server() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


def plan(server: HubServer, home: Path, model: str, *flags: str) -> dict[str, Any]:
    """Return the figures of `tokend plan` on an empty cache of the hub."""
    environment = os.environ | {
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": server.url,
        "TMPDIR": str(home),
    }
    command = [*TOKEND, "plan", model, "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def same_in_both(figures: dict[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the moment."""
    names = ("weights_bytes", "kv_bytes_per_1k_tokens", "end_tokens", "fits")
    return {name: figures[name] for name in names if name in figures}


FLAGS = ("--dtype", "float32", "--kv-cache-memory", "64M")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_repository_of_safetensors(server: HubServer, tmp_path: Path) -> None:
    """Nothing is kept, neither in the caches nor in the temporary folder."""
    save_qwen3(tmp_path / "mine")
    files = files_of(tmp_path / "mine")
    server.repositories["org/mine"] = Repository(files)
    (home := tmp_path / "home").mkdir()
    found = plan(server, home, "org/mine", *FLAGS)
    assert same_in_both(found) == same_in_both(plan(server, home, str(tmp_path / "mine"), *FLAGS))
    assert len(same_in_both(found)) >= 3
    assert found["seconds_per_token"] > 0
    weights = len(files["model.safetensors"])
    others = sum(map(len, files.values())) - weights
    assert weights > 8 << 20, "more than the first bytes"
    assert others <= server.num_sent < others + (2 << 20)
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_a_gguf_file(server: HubServer, tmp_path: Path) -> None:
    path, _ = save_gguf("Qwen2ForCausalLM", tmp_path)
    server.repositories["org/mine-gguf"] = Repository({"mine-Q8_0.gguf": path.read_bytes()})
    (home := tmp_path / "home").mkdir()
    found = plan(server, home, "org/mine-gguf", *FLAGS)
    assert same_in_both(found) == same_in_both(plan(server, home, str(path), *FLAGS))
    assert not [each for each in home.rglob("*") if each.is_file()]


def test_a_model_that_is_there_is_not_asked_for(server: HubServer, tmp_path: Path) -> None:
    save_qwen3(tmp_path / "mine")
    server.repositories["org/mine"] = Repository(files_of(tmp_path / "mine"))
    (home := tmp_path / "home").mkdir()
    environment = os.environ | {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": server.url}
    subprocess.run([*TOKEND, "pull", "org/mine"], env=environment, check=True, capture_output=True)
    server.requests.clear()
    plan(server, home, "org/mine", *FLAGS)
    assert server.requests == []


def test_a_name_that_does_not_exist(server: HubServer, tmp_path: Path) -> None:
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": server.url}
    command = [*TOKEND, "plan", "org/none"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "has no model org/none" in done.stderr
    assert "Traceback" not in done.stderr
