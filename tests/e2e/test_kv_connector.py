"""Daemons whose KV is also in a shared folder: the same greedy tokens, whoever computed them.

SmolLM2 in float32. One daemon fills the folder, another one finds its blocks there; files that
were altered or have gone are computed again.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("media")

PROMPTS = [[(7 * seed + 11 * i) % 30_000 + 50 for i in range(70 + 40 * seed)] for seed in range(4)]


def connector(name: str, **extra: object) -> str:
    return json.dumps({"kv_connector": name, "kv_connector_extra_config": extra})


def shared(folder: Path) -> str:
    return connector("SharedStorageConnector", shared_storage_path=str(folder))


def daemon(*flags: str) -> Daemon:
    return Daemon("--dtype", "float32", "--num-gpu-blocks-override", "100", *flags)


def tokens_of(daemon: Daemon) -> list[str]:
    """Greedy continuations of PROMPTS."""
    texts = []
    for prompt in PROMPTS:
        answer = httpx.post(
            f"{daemon.url}/v1/completions",
            json={
                "model": "smollm2-135m-instruct",
                "prompt": prompt,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
            },
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    return texts


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[list[str]]:
    with daemon() as running:
        yield tokens_of(running)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_another_daemon_finds_the_blocks_of_the_first(
    tmp_path: Path, undisturbed: list[str], num_workers: int
) -> None:
    flags = ("--tensor-parallel-size", str(num_workers), "--kv-transfer-config", shared(tmp_path))
    with daemon(*flags) as first:
        assert tokens_of(first) == undisturbed
        assert first.metric("vllm:external_prefix_cache_hits_total") == 0
    with daemon(*flags) as second:
        assert tokens_of(second) == undisturbed
        full_blocks = sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)
        assert second.metric("vllm:external_prefix_cache_hits_total") == full_blocks
        assert second.metric("vllm:external_prefix_cache_queries_total") == sum(map(len, PROMPTS))


def test_altered_and_missing_files_are_computed_again(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    """Row 40 for a folder: a torn file, a flipped bit, one that is gone."""
    flags = ("--kv-transfer-config", shared(tmp_path))
    with daemon(*flags) as first:
        tokens_of(first)
    files = sorted(tmp_path.rglob("*-of-1"))
    with daemon(*flags) as second:
        for index, file in enumerate(files[:: len(files) // 8]):
            content = bytearray(file.read_bytes())
            content[1000] ^= 4
            if index % 3 == 0:
                file.write_bytes(content)
            elif index % 3 == 1:
                file.write_bytes(content[:777])
            else:
                file.unlink()
        assert tokens_of(second) == undisturbed


def test_several_connectors_as_one(tmp_path: Path, undisturbed: list[str]) -> None:
    """KVH-08: both folders get the same files; when the first is emptied, the second is read."""
    folders = tmp_path / "a", tmp_path / "b"
    children = [json.loads(shared(each)) for each in folders]
    flags = ("--kv-transfer-config", connector("MultiConnector", connectors=children))
    with daemon(*flags) as first:
        assert tokens_of(first) == undisturbed
    names = [{each.name for each in folder.rglob("*-of-1")} for folder in folders]
    assert names[0] == names[1] != set()
    for each in folders[0].rglob("*-of-1"):
        each.unlink()
    with daemon(*flags) as second:
        assert tokens_of(second) == undisturbed
        assert second.metric("vllm:external_prefix_cache_hits_total") > 0


def test_kills_of_worker_and_engine_between_loads(tmp_path: Path, undisturbed: list[str]) -> None:
    flags = ("--kv-transfer-config", shared(tmp_path))
    with daemon(*flags) as running:
        assert tokens_of(running) == undisturbed
        for role in ("worker", "engine_core"):
            running.processes()[role].kill()
            assert tokens_of(running) == undisturbed
        assert running.metric("vllm:external_prefix_cache_hits_total") > 0
