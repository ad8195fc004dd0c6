"""Examples of README.md and docs/ answer what the pages show, with all kernels and weight formats.

An example is a curl command or the Python blocks of a page, which run as one program. What is shown
is the block after it, marked json or text, or the comment behind a print().
"""

import ast
import contextlib
import io
import json
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proto.settings.config import CpuKernels, CpuWeights
from tests.e2e.daemon import Daemon
from tests.e2e.reference import Reference
from tests.fakes.adapters import make_adapter
from worker.cpu.kernels import runnable_variants

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy/README.md"]
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000|(?<= )localhost:8000")
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
POOLING = ("embeddings", "pooling", "classify", "score", "rerank")


@dataclass(frozen=True)
class Example:
    """source: a shell command or a Python program. shown: what the page says that it answers."""

    name: str
    source: str
    shown: str
    is_python: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """What a curl command sends; empty for a GET."""
        words = shlex.split(self.source.replace("\\\n", " "))
        body = next((words[i + 1] for i, word in enumerate(words) if word == "-d"), "{}")
        parsed: dict[str, Any] = json.loads(body)
        return parsed

    @property
    def pools(self) -> bool:
        return bool(re.search(rf"8000(/v1)?/({'|'.join(POOLING)})\b", self.source))

    @property
    def fills_in(self) -> bool:
        """Whether it needs a model that fills in the middle (`test_infill.py`)."""
        return not self.is_python and not {"suffix", "input_suffix"}.isdisjoint(self.body)

    def run(self, url: str) -> str:
        """Return what it prints; raises AssertionError for a status of an error."""
        source = ADDRESS.sub(url, self.source)
        if self.is_python:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(source, self.name, "exec"), {"__name__": "__main__"})
            return printed.getvalue()
        command = source.replace("curl ", "curl -sS --max-time 100 --fail-with-body ", 1)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {done.stderr} {done.stdout}"
        return done.stdout


def examples() -> list[Example]:
    return [example for page in PAGES for example in examples_of(page)]


def examples_of(page: Path) -> list[Example]:
    found = []
    name = str(page.relative_to(ROOT))
    blocks = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(), re.M | re.S)
    programs: list[str] = []
    for number, (_, language, text) in enumerate(blocks):
        after = blocks[number + 1] if number + 1 < len(blocks) else ("", "", "")
        shown = after[2] if after[1] in ("json", "text") else ""
        if language == "python" and re.search(r"localhost:8000|127\.0\.0\.1:8000", text):
            programs.append(text)
        elif not language:
            commands = curl_commands(text)
            for command in filter(ADDRESS.search, commands):  # others are for other listeners
                found.append(Example(f"{name}: {command[:60]}", command, shown))
    if programs:
        comments = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(programs), re.M)
        program = "\n".join(programs)
        found.append(Example(f"{name}: python", program, "\n".join(comments), is_python=True))
    return found


def curl_commands(text: str) -> list[str]:
    """Return the curl commands of a block, each with all its lines."""
    commands: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip().startswith("curl "):
            continue
        command = line.strip()
        while command.endswith("\\") or command.count("'") % 2:
            command += "\n" + next(lines)
        commands.append(command)
    return commands


def shown_words(shown: str) -> set[str]:
    """Return the words of an answer: of its text, its content and the arguments of its calls."""
    with contextlib.suppress(ValueError):
        shown = " ".join(_texts(json.loads(shown))) or shown
    return set(re.findall(r"[^\W\d]{3,}", shown))


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    if not isinstance(value, dict):
        return []
    own = [value[key] for key in ("text", "content", "arguments", "name") if key in value]
    texts = [text for text in own if isinstance(text, str)]
    return texts + [text for item in value.values() for text in _texts(item)]


def test_the_examples_are_found() -> None:
    found = examples()
    assert sum(example.is_python for example in found) >= 2
    assert sum(not example.is_python for example in found) >= 7
    assert sum(bool(shown_words(example.shown)) for example in found) >= 4


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_every_example_that_generates_has_a_limit(example: Example) -> None:
    """An answer of a small model may otherwise repeat itself to the end of its context."""
    if not example.is_python:
        generates = "/completions" in example.source or "/messages" in example.source
        assert not generates or LIMITS & set(example.body), example.source
        return
    for node in ast.walk(ast.parse(example.source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = {keyword.arg for keyword in node.keywords}
            if node.func.attr == "create" and "input" not in names:
                assert LIMITS & names, ast.unparse(node)


def combinations() -> list[tuple[CpuKernels, CpuWeights]]:
    kinds = [variant.name for variant in runnable_variants()] or ["auto"]
    forms: tuple[CpuWeights, ...] = ("packed", "int8", "packed+int8", "bf16", "f32")
    return [(kind, form) for kind in kinds for form in forms]  # type: ignore[misc]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the packaged model, in place of those that pages name."""
    folder = tmp_path_factory.mktemp("adapters") / "small"
    return make_adapter(Reference.load().model, folder, size=0.01)


@pytest.mark.suite("examples")
@pytest.mark.parametrize(("kernels", "weights"), combinations())
def test_examples_answer_what_the_page_shows(
    kernels: CpuKernels, weights: CpuWeights, adapter: Path
) -> None:
    adapters = [f"{name}={adapter}" for name in ("sql", "pirate")]
    flags = ("--cpu-kernels", kernels, "--cpu-weights", weights, "--kv-cache-memory", "256M")
    flags = (*flags, "--enable-lora", "--lora-modules", *adapters)
    failures = []
    with Daemon(*flags) as daemon:
        for example in examples():
            if example.pools or example.fills_in:
                continue
            try:
                answer = example.run(daemon.url)
            except AssertionError as error:
                failures.append(str(error))
                continue
            missing = {word for word in shown_words(example.shown) if word not in answer}
            if missing:
                failures.append(f"{example.name}: without {missing}: {answer}")
    assert not failures, "\n".join(failures)


@pytest.mark.suite("examples")
def test_examples_of_pooling_answer() -> None:
    pooling = [example for example in examples() if example.pools]
    assert pooling
    with Daemon("--runner", "pooling") as daemon:
        for example in pooling:
            assert "data" in json.loads(example.run(daemon.url))
