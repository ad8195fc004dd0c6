"""Files, functions and variables that the pages about the code name exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [DOCS / "architecture.md", DOCS / "extending.md", *sorted(DOCS.glob("internals/*.md"))]
REFERENCE = re.compile(
    r"`((?:proto|engine_core|worker|api_server|deploy|tests)/[\w/.]*?)"
    r"(?::(\w+)`((?:(?:,| and|, and)\s`\w+`)*)|`)"
)
"""A file; perhaps a name in it, and further names after that: `a/b.py:first`, `second`."""


def names_in(path: Path) -> set[str]:
    """Return the names of functions, methods, classes and variables of a file.

    Of a C++ file: all words outside of comments.
    """
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", re.sub(r"//.*", "", text)))
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing(text: str) -> list[str]:
    found = []
    for path, name, others in REFERENCE.findall(text):
        if not (ROOT / path).exists():
            found.append(path)
        elif name:
            names = [name, *re.findall(r"`(\w+)`", others)]
            found += [f"{path}:{each}" for each in names if each not in names_in(ROOT / path)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_of_a_page_exist(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_the_check_finds_missing_names() -> None:
    assert missing("`proto/codec.py:nothing`, `encode` and\n`never`, `proto/none.py`") == [
        "proto/codec.py:nothing",
        "proto/codec.py:never",
        "proto/none.py",
    ]
    assert missing("`worker/csrc/layers/stack.cpp:attend_to_latents`, `nothing`") == [
        "worker/csrc/layers/stack.cpp:nothing"
    ]


def test_the_architecture_stays_short() -> None:
    assert len(PAGES[0].read_text().split()) < 4_000
