"""Reasoning, its budget and structured output with the real model and a reasoning template.

The model's own template has no reasoning; the test's opens it at the end of the prompt.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from deploy.bench.processes import pids_by_title
from tests.e2e.daemon import Daemon, DaemonPool

pytestmark = pytest.mark.suite("daemons")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Which city is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(TEMPLATE)
    return path


def flags(template: Path) -> list[str]:
    return ["--chat-template", str(template)]


@pytest.fixture
def thinking(template: Path, daemons: DaemonPool) -> Iterator[Daemon]:
    with daemons.borrow(*flags(template)) as running:
        yield running


def chat(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "seed": 5} | fields
    response = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def end_ids(daemon: Daemon) -> list[int]:
    found = httpx.post(f"{daemon.url}/tokenize", json={"prompt": "</think>"}).json()["tokens"]
    return [int(each) for each in found]


@pytest.mark.parametrize(
    ("budget", "fields"), [(0, {}), (1, {"temperature": 1.2, "n": 3}), (10, {})]
)
def test_a_thinking_budget_is_exact(thinking: Daemon, budget: int, fields: dict[str, Any]) -> None:
    end = end_ids(thinking)
    fields = {"return_token_ids": True, "ignore_eos": True, **fields}
    body = chat(thinking, thinking_token_budget=budget, **fields)
    for choice in body["choices"]:
        ids = choice["token_ids"]
        assert ids[budget : budget + len(end)] == end
        assert choice["message"]["content"] is None or choice["message"]["content"].strip()
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == budget * len(body["choices"])


def test_without_a_budget_thinking_continues(thinking: Daemon) -> None:
    message = chat(thinking, ignore_eos=True, max_tokens=30)["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["reasoning"]) > 40


def test_thinking_can_be_disabled(thinking: Daemon) -> None:
    body = chat(thinking, chat_template_kwargs={"enable_thinking": False})
    assert "reasoning" not in body["choices"][0]["message"]
    assert "Paris" in body["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in body["usage"]


def test_structured_output_is_enforced_after_thinking(thinking: Daemon) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA, "strict": True}}
    body = chat(thinking, thinking_token_budget=12, response_format=form, max_tokens=100)
    message = body["choices"][0]["message"]
    assert message["reasoning"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_stream_has_the_same_reasoning_and_answer(thinking: Daemon) -> None:
    fields: dict[str, Any] = {"thinking_token_budget": 12, "ignore_eos": True}
    whole = chat(thinking, **fields)["choices"][0]["message"]
    streamed = stream(thinking, **fields)
    assert streamed == (whole["reasoning"], whole["content"] or "")


def stream(daemon: Daemon, *, dying: str = "", **fields: Any) -> tuple[str, str]:
    """Stream an answer; returns (reasoning, answer). dying: a process to kill meanwhile."""
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "seed": 5, "stream": True}
    texts = {"reasoning": "", "content": ""}
    num_events = 0
    url = f"{daemon.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body | fields, timeout=180) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for name in texts:
                texts[name] += event["choices"][0]["delta"].get(name) or ""
            num_events += 1
            if num_events == 6 and dying:
                (pid,) = [pid for title, pid in pids_by_title(daemon.pid).items() if dying in title]
                os.kill(pid, signal.SIGKILL)
    return texts["reasoning"], texts["content"]


def test_a_thinking_budget_is_exact_after_a_restart(template: Path) -> None:
    fields: dict[str, Any] = {"thinking_token_budget": 25, "ignore_eos": True}
    with Daemon(*flags(template), "--async-scheduling") as daemon:
        whole = stream(daemon, **fields)
        for dying in ("engine", "worker"):
            assert stream(daemon, dying=dying, **fields) == whole
    assert whole[1]
