"""Daemons that share KV through a folder give the same greedy tokens.

SmolLM2 in float32. One daemon fills the folder, another loads its blocks; altered or missing files
are recomputed.
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


def shared_storage(folder: Path) -> str:
    return connector("SharedStorageConnector", shared_storage_path=str(folder))


def start_daemon(*flags: str) -> Daemon:
    return Daemon("--dtype", "float32", "--num-gpu-blocks-override", "100", *flags)


def complete_prompts(daemon: Daemon) -> list[str]:
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
def expected() -> Iterator[list[str]]:
    with start_daemon() as running:
        yield complete_prompts(running)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_another_daemon_loads_the_blocks_of_the_first(
    tmp_path: Path, expected: list[str], num_workers: int
) -> None:
    flags = (
        "--tensor-parallel-size",
        str(num_workers),
        "--kv-transfer-config",
        shared_storage(tmp_path),
    )
    with start_daemon(*flags) as first:
        assert complete_prompts(first) == expected
        assert first.metric("vllm:external_prefix_cache_hits_total") == 0
    with start_daemon(*flags) as second:
        assert complete_prompts(second) == expected
        full_blocks = sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)
        assert second.metric("vllm:external_prefix_cache_hits_total") == full_blocks
        assert second.metric("vllm:external_prefix_cache_queries_total") == sum(map(len, PROMPTS))


def test_blocks_of_altered_and_missing_files_are_recomputed(
    tmp_path: Path, expected: list[str]
) -> None:
    """Truncated files, files with a flipped bit, and missing files."""
    flags = ("--kv-transfer-config", shared_storage(tmp_path))
    with start_daemon(*flags) as first:
        complete_prompts(first)
    files = sorted(tmp_path.rglob("*-of-1"))
    with start_daemon(*flags) as second:
        for index, file in enumerate(files[:: len(files) // 8]):
            content = bytearray(file.read_bytes())
            content[1000] ^= 4
            if index % 3 == 0:
                file.write_bytes(content)
            elif index % 3 == 1:
                file.write_bytes(content[:777])
            else:
                file.unlink()
        assert complete_prompts(second) == expected


def test_multi_connector_stores_to_all_and_loads_from_any(
    tmp_path: Path, expected: list[str]
) -> None:
    """Both folders get the same files; without the files of the first, the second is read."""
    folders = tmp_path / "a", tmp_path / "b"
    children = [json.loads(shared_storage(each)) for each in folders]
    flags = ("--kv-transfer-config", connector("MultiConnector", connectors=children))
    with start_daemon(*flags) as first:
        assert complete_prompts(first) == expected
    names = [{each.name for each in folder.rglob("*-of-1")} for folder in folders]
    assert names[0] == names[1] != set()
    for each in folders[0].rglob("*-of-1"):
        each.unlink()
    with start_daemon(*flags) as second:
        assert complete_prompts(second) == expected
        assert second.metric("vllm:external_prefix_cache_hits_total") > 0


def test_tokens_are_the_same_after_kills_of_worker_and_engine(
    tmp_path: Path, expected: list[str]
) -> None:
    flags = ("--kv-transfer-config", shared_storage(tmp_path))
    with start_daemon(*flags) as running:
        assert complete_prompts(running) == expected
        for role in ("worker", "engine_core"):
            running.processes()[role].kill()
            assert complete_prompts(running) == expected
        assert running.metric("vllm:external_prefix_cache_hits_total") > 0
