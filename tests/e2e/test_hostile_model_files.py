"""Files of a model that is not trusted: other clients wait no longer, memory stays bounded."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.bystander import Bystander
from tests.e2e.daemon import TOKEND, Daemon

pytestmark = pytest.mark.suite("hostile")

SLOW = {
    "sum": "{{ range(99999) | map('string') | list | sum(start=[]) }}",
    "center": "{{ 'x' | center(10**10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "indent": "{{ [1] | tojson(indent=n) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
}


def test_a_chat_template(tmp_path: Path) -> None:
    """Operations that would build a huge text, or run for hours, are a 400."""
    cases = "".join(f"{{% elif kind == {kind!r} %}}{text}" for kind, text in SLOW.items())
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% set kind = messages[0].content %}{% set n = 10**10 %}"
        f"{{% if kind == 'none' %}}ok{cases}{{% else %}}hello{{% endif %}}"
    )
    with Daemon("--chat-template", str(template)) as daemon:
        url = f"{daemon.url}/v1/chat/completions"
        with httpx.Client(timeout=60) as client:

            def ask(content: str) -> httpx.Response:
                messages = [{"role": "user", "content": content}]
                return client.post(url, json={"messages": messages, "max_tokens": 1})

            assert ask("hello").status_code == 200
            with Bystander(daemon) as bystander:
                for kind in SLOW:
                    answer = ask(kind)
                    assert answer.status_code == 400, (kind, answer.text)
                    assert answer.json()["error"]["param"] == "messages"
                assert ask("hello").status_code == 200
            bystander.check()


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
NEVER_ENDING = {
    **{"type": "Split", "pattern": {"Regex": "(a+)+$"}},
    **{"behavior": "Isolated", "invert": False},
}


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 40}}, "normalizer"),
        ({"pre_tokenizer": NEVER_ENDING}, "pre_tokenizer"),
    ],
)
def test_a_tokenizer(tmp_path: Path, parts: dict[str, Any], named: str) -> None:
    """The daemon does not start with it, and says which part it is."""
    tokenizer = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": []},
        **{"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | parts))
    command = [*TOKEND, "serve", "--port", "0", "--tokenizer", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"tokenizer.json: {named}" in ended.stderr


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_fifo_in_a_folder(tmp_path: Path, name: str) -> None:
    """The daemon does not wait for a writer."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    command = [*TOKEND, "serve", "--port", "0", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"{name} is a FIFO, not a regular file" in ended.stderr
