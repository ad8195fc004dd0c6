"""Filling in with a real daemon and a random model whose vocabulary has the tokens for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.daemon import Daemon
from tests.e2e.own_models import save_qwen3
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("settings")

RENAMED = {
    "<gh_stars>": "<fim_prefix>",
    "<issue_start>": "<fim_suffix>",
    "<issue_comment>": "<fim_middle>",
}
"""Special tokens of the packaged model that get other names."""
BEFORE = "def fibonacci(n):\n    a, b = 0, 1\n    for number in range(n):\n"
AFTER = "\n    return a  # not <fim_suffix>\n"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("infill") / "mine"
    model = save_qwen3(folder)
    for path in folder.glob("*token*.json"):
        text = path.read_text()
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        path.write_text(text)
    return folder, model


@pytest.fixture(scope="module")
def daemon(model: tuple[Path, torch.nn.Module]) -> Iterator[Daemon]:
    with Daemon(str(model[0]), "--dtype", "float32", "--kv-cache-memory", "64M") as running:
        yield running


def post(daemon: Daemon, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{daemon.url}{path}", json={**GREEDY, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_suffix_is_seen_by_the_model(daemon: Daemon, model: tuple[Path, torch.nn.Module]) -> None:
    """The tokens are those of the prompt of both texts; a special token in them is text."""
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 12, "return_token_ids": True}
    (choice,) = post(daemon, "/v1/completions", **body)["choices"]
    Reference(model[1], None).assert_greedy([(choice["prompt_token_ids"], choice["token_ids"])])
    vocabulary = json.loads((model[0] / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}
    specials = [each for each in choice["prompt_token_ids"] if each in ids.values()]
    assert specials == [ids[name] for name in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")]
    text = httpx.post(
        f"{daemon.url}/detokenize", json={"tokens": choice["prompt_token_ids"]}, timeout=60
    ).json()["prompt"]
    assert text == f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>"
    (other,) = post(daemon, "/v1/completions", **(body | {"suffix": "x"}))["choices"]
    assert other["token_ids"] != choice["token_ids"]


def test_infill_streams_what_it_answers_and_finds_its_prefix(daemon: Daemon) -> None:
    body = {"input_prefix": BEFORE * 3, "input_suffix": AFTER, "n_predict": 10}
    first = post(daemon, "/infill", **body, return_tokens=True)
    assert len(first["tokens"]) == first["tokens_predicted"] == 10
    assert first["stop_type"] == "limit"
    again = post(daemon, "/infill", **body)
    assert again["content"] == first["content"]
    blocks = (first["tokens_evaluated"] - 1) // 16 * 16
    assert again["tokens_cached"] == again["timings"]["cache_n"] == blocks
    assert post(daemon, "/infill", **body, cache_prompt=False)["tokens_cached"] == 0
    longer = body | {"input_prefix": BEFORE * 3 + "        a, b = b, a + b"}
    assert 0 < post(daemon, "/infill", **longer)["tokens_cached"] < blocks
    events = []
    with httpx.stream(
        "POST", f"{daemon.url}/infill", json={**GREEDY, **body, "stream": True}, timeout=60
    ) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == first["content"]
    assert [token for event in events for token in event["tokens"]] == first["tokens"]
