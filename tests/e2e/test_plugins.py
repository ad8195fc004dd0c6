"""A package of parts from outside, installed and used by a daemon; and names that are refused."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import TOKEND, Daemon, eventually
from tests.e2e.reference import Reference, save_random

SOURCE = Path(__file__).parents[1] / "example_plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which the package is installed."""
    folder = tmp_path_factory.mktemp("packages")
    copy = shutil.copytree(SOURCE, folder / "source")
    target = folder / "site"
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(copy)],
        check=True,
    )
    path = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([str(target), *filter(None, [path])])}


def save_example(folder: Path) -> Reference:
    """Save a tiny random model of the example's family."""
    from transformers import LlamaConfig

    model = save_random(LlamaConfig, folder, head_dim=32)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["ExampleForCausalLM"], "model_type": "example"}
    config["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    return Reference(model, None)


def tokens(daemon: Daemon, prompt: list[int], num_tokens: int = 12) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


@pytest.mark.suite("daemons")
@pytest.mark.parametrize(
    "registered",
    [True, pytest.param(False, marks=pytest.mark.suite("settings"))],
    ids=["names", "modules"],
)
def test_parts_of_an_installed_package_serve(
    registered: bool, environment: dict[str, str], tmp_path: Path
) -> None:
    """By the names that the package registers, and by module:name."""
    reference = save_example(tmp_path / "model")

    def part(name: str, target: str) -> str:
        return name if registered else f"tokend_example.{target}"

    connector = {
        "kv_connector": part("Folder", "connector:Folder"),
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    proposer = part("repeat", "engine:RepeatedToken")
    flags = [
        *(str(tmp_path / "model"), "--dtype", "float32", "--max-num-seqs", "1"),
        *("--scheduling-policy", part("longest", "engine:LongestFirst")),
        *("--scheduler-features", part("admission_log", "engine:AdmissionLog")),
        *("--eviction-policy", part("most_recent", "engine:MostRecentFirst")),
        *("--kv-transfer-config", json.dumps(connector)),
        *("--speculative-config", json.dumps({"method": proposer})),
        *("--device", part("named_cpu", "device:NamedCpu")),
        *("--tool-call-parser", part("angled", "tools:ANGLED")),
        *("--num-gpu-blocks-override", "40"),
    ]
    if not registered:
        flags += ["--model-families", "tokend_example.family:FAMILY"]
    with Daemon(*flags, environment=environment) as daemon:
        prompts = [list(range(100, 100 + length)) for length in (40, 20, 60)]
        found = [tokens(daemon, prompt) for prompt in prompts]
        reference.assert_greedy(list(zip(prompts, found, strict=True)))
        assert "example of" in "\n".join(daemon.output)

        with ThreadPoolExecutor(4) as threads:
            blocker = threads.submit(tokens, daemon, list(range(200, 210)), 580)
            eventually(lambda: daemon.metric("vllm:num_requests_running") == 1)
            others = [  # they wait until the first one ends
                threads.submit(tokens, daemon, list(range(300, 300 + length)))
                for length in (30, 90, 60)
            ]
            eventually(lambda: daemon.metric("vllm:num_requests_waiting") == 3)
            assert not blocker.done()
            for each in (blocker, *others):
                each.result()
        log = [line for line in daemon.output if "admitted a prompt of" in line]
        lengths = [int(line.split("admitted a prompt of ")[1].split()[0]) for line in log]
        assert lengths == [40, 20, 60, 10, 90, 60, 30], "the longest goes first"
        drafted = daemon.metric("tokend:spec_decode_num_draft_tokens_by_source_total")
        assert drafted > 0
        assert any(each.is_file() for each in (tmp_path / "kv").rglob("*"))


@pytest.mark.suite("settings")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--scheduling-policy", "shortest"), "fcfs, priority, continuum, or module:name"),
        (("--scheduling-policy", "no.such:Policy"), "no.such cannot be imported"),
        (("--scheduling-policy", "collections:Counter"), "is no subclass of"),
        (("--scheduler-features", "collections:Nothing"), "collections has no Nothing"),
        (("--eviction-policy", "json:JSONDecoder"), "is no subclass of"),
        (("--tool-call-parser", "json:loads"), "is no ToolCallFormat"),
        (("--device", "json:JSONDecoder"), "is no subclass of"),
        (("--model-families", "json:loads"), "is no Family"),
        (("--scheduler-cls", "my.Scheduler"), "see --scheduling-policy"),
    ],
)
def test_a_part_that_is_none_ends_the_start_with_its_name(
    flags: tuple[str, str], words: str, tmp_path: Path
) -> None:
    process = subprocess.run(
        [*TOKEND, "serve", "--port", "0", *flags],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 2, process.stderr
    assert words in process.stderr
