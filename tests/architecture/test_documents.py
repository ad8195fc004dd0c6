"""Files and functions named in docs/architecture.md and docs/internals exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]
REFERENCE = re.compile(
    r"`((?:proto|engine_core|worker|api_server|deploy|tests)/[\w/.]*?)(?::(\w+))?`"
)


def names_in(path: Path) -> set[str]:
    """Return the names of all functions, methods and classes of a module."""
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, definitions)
    }


def missing(text: str) -> list[str]:
    found = []
    for path, name in REFERENCE.findall(text):
        if not (ROOT / path).exists():
            found.append(path)
        elif name and name not in names_in(ROOT / path):
            found.append(f"{path}:{name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_functions_of_a_page_exist(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_the_check_finds_missing_names() -> None:
    assert missing("`proto/codec.py:nothing`, `proto/none.py`") == [
        "proto/codec.py:nothing",
        "proto/none.py",
    ]


def test_the_architecture_stays_short() -> None:
    assert len(PAGES[0].read_text().split()) < 4_000
