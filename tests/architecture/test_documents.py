"""Files, functions, variables and attributes that the pages about the code name exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
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
MEMBER = re.compile(r"`([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)`")
"""A member of a class: `Class.method`."""
FOLDERS = ("proto", "engine_core", "worker", "api_server", "deploy")


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


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return (members, names of bases) by name of a class; classes of one name count as one."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members, bases = found.setdefault(node.name, (set(), set()))
                members |= set(members_of(node))
                bases |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    return found


def members_of(cls: ast.ClassDef) -> Iterator[str]:
    """Yield the methods and fields of a class, and the attributes that its methods assign."""
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def has_member(cls: str, member: str) -> bool:
    members, bases = classes().get(cls, (set(), set()))
    return member in members or any(has_member(base, member) for base in bases)


def missing_members(text: str) -> list[str]:
    return [f"{cls}.{name}" for cls, name in MEMBER.findall(text) if not has_member(cls, name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_of_a_page_exist(page: Path) -> None:
    assert missing(page.read_text()) == []
    assert missing_members(page.read_text()) == []


def test_the_check_finds_missing_names() -> None:
    assert missing("`proto/codec.py:nothing`, `encode` and\n`never`, `proto/none.py`") == [
        "proto/codec.py:nothing",
        "proto/codec.py:never",
        "proto/none.py",
    ]
    assert missing("`worker/csrc/layers/stack.cpp:attend_to_latents`, `nothing`") == [
        "worker/csrc/layers/stack.cpp:nothing"
    ]
    assert missing_members("`KVCacheManager.free`, `BlockPool.nothing`, `Nothing.free`") == [
        "BlockPool.nothing",
        "Nothing.free",
    ]
    assert missing_members("`FCFSQueue.reorder_request`, `FCFSQueue.next`") == ["FCFSQueue.next"]


def test_the_architecture_stays_short() -> None:
    assert len(PAGES[0].read_text().split()) < 4_000
