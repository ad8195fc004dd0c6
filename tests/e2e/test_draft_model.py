"""A draft model in a real daemon: answers are those without, also after deaths and a reload.

The served model computes what the draft model computes, with many more layers, most of which
add nothing; so drafts are accepted, and pay.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.daemon import TOKEND, Daemon, eventually
from tests.e2e.reference import packaged_model, save_random

pytestmark = pytest.mark.suite("settings")
NUM_LAYERS = 60
FLAGS = ("--dtype", "float32", "--max-num-seqs", "8", "--reload-strategy", "in-place")
BODIES: list[dict[str, Any]] = [
    {"prompt": list(range(100, 160)), "temperature": 0},
    {"prompt": list(range(200, 230)), "temperature": 1.0, "top_p": 0.95, "seed": 3},
    {"prompt": list(range(100, 150)), "temperature": 0.7, "repetition_penalty": 1.1, "seed": 4},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of the served model and of the draft model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("models")
    small = save_random(Qwen3Config, root / "small", head_dim=32)
    with torch.no_grad():
        small.model.norm.weight.fill_(200.0)  # confident, as trained models are
    small.save_pretrained(root / "small")
    large = Qwen3ForCausalLM(
        Qwen3Config(
            **small.config.to_dict() | {"num_hidden_layers": NUM_LAYERS, "layer_types": None}
        )
    )
    with torch.no_grad():
        for layer in large.model.layers[small.config.num_hidden_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    large.load_state_dict(small.state_dict(), strict=False)
    large.save_pretrained(root / "large")
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", root / "large")
    return str(root / "large"), str(root / "small")


def answers(url: str, num_tokens: int = 60) -> list[list[int]]:
    found = []
    for body in BODIES:
        request = body | {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
        response = httpx.post(f"{url}/v1/completions", json=request, timeout=120)
        assert response.status_code == 200, response.text
        found.append(response.json()["choices"][0]["token_ids"])
    return found


@pytest.fixture(scope="module")
def expected(models: tuple[str, str]) -> list[list[int]]:
    with Daemon(models[0], *FLAGS, "--speculative-config", '{"method": "none"}') as daemon:
        return answers(daemon.url)


def drafting(models: tuple[str, str], *flags: str) -> Daemon:
    text = json.dumps({"method": "draft_model", "model": models[1]})
    return Daemon(models[0], *FLAGS, "--speculative-config", text, *flags)


@pytest.fixture(scope="module")
def daemon(models: tuple[str, str]) -> Iterator[Daemon]:
    with drafting(models) as running:
        yield running


def num_accepted(daemon: Daemon) -> float:
    return daemon.metric("vllm:spec_decode_num_accepted_tokens_total")


def accepts_drafts(
    daemon: Daemon, expected: list[list[int]], num_tokens: int = 60, num_wanted: int = 20
) -> bool:
    """Ask for answers of `num_tokens` tokens until as many drafted tokens as wanted were accepted.

    Whether drafts pay is decided by times that the engine measured, which other processes may have
    lengthened at first; so one round may go without drafts.
    """
    before = num_accepted(daemon)
    for _ in range(10):
        assert answers(daemon.url, num_tokens) == [each[:num_tokens] for each in expected]
        if num_accepted(daemon) >= before + num_wanted:
            return True
    return False


def test_answers_are_those_without_drafts(daemon: Daemon, expected: list[list[int]]) -> None:
    assert accepts_drafts(daemon, expected)
    assert answers(daemon.url) == expected, "with all prompts in the prefix cache"


def kill(name: str) -> Callable[[Daemon], None]:
    def kill_process(daemon: Daemon) -> None:
        process = daemon.processes()[name]
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: daemon.processes().get(name, process).pid != process.pid, 60)

    return kill_process


def reload(daemon: Daemon) -> None:
    times = daemon.text.count("tokend reloaded after")
    daemon.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: daemon.text.count("tokend reloaded after") > times, 60)


@pytest.mark.parametrize(
    "event",
    [
        kill("worker"),
        pytest.param(kill("engine_core"), marks=pytest.mark.suite("settings")),
        pytest.param(reload, marks=pytest.mark.suite("settings")),
    ],
)
def test_drafts_go_on_after(
    daemon: Daemon, expected: list[list[int]], event: Callable[[Daemon], None]
) -> None:
    event(daemon)
    assert accepts_drafts(daemon, expected)


@pytest.mark.suite("settings")
def test_two_workers(models: tuple[str, str], expected: list[list[int]]) -> None:
    with drafting(models, "--tensor-parallel-size", "2") as daemon:
        assert accepts_drafts(daemon, expected, num_tokens=30, num_wanted=1)


def test_a_missing_draft_model_ends_the_start(models: tuple[str, str]) -> None:
    text = json.dumps({"model": "/nowhere/draft"})
    daemon = Daemon(models[0], *FLAGS, "--speculative-config", text)
    try:
        assert daemon.wait_exit(60) == 2
        assert "--speculative-config: model: no model '/nowhere/draft'" in daemon.text
    finally:
        daemon.stop()


def test_the_plan_names_the_draft_model(models: tuple[str, str]) -> None:
    text = json.dumps({"model": models[1]})
    done = subprocess.run(
        [*TOKEND, "plan", models[0], *FLAGS, "--speculative-config", text],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "drafts by small" in done.stdout
    assert "draft model" in done.stdout
