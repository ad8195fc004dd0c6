"""Imports within a process have one direction, and no file imports itself by way of others."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("proto", "engine_core", "worker", "api_server", "deploy")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
}
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def directions(page: str) -> dict[str, list[str]]:
    """Return the table "Directions" of a page: folder → its parts, which import earlier ones."""
    section = page.split("### Directions")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)/` \| ([^|]*) \|$", section, re.MULTILINE)
    return {folder: cell.split(", ") for folder, cell in rows}


ORDER = directions(PAGE)


def statements(
    node: ast.AST, for_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports below a node, and whether they are for types only."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, for_types
    if_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node):
        yield from statements(child, for_types or if_types)


def imported(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the modules of the product that a source imports, and whether for types only."""
    for statement, for_types in statements(ast.parse(source)):
        for alias in statement.names:
            names = [alias.name]
            if isinstance(statement, ast.ImportFrom):
                names = [f"{statement.module}.{alias.name}", f"{statement.module}"]
            found = next((name for name in names if name in MODULES), None)
            if found is not None:
                yield found, for_types


def part_of(module: str) -> str:
    """Return the folder below the process's folder that a module is in, or its own name."""
    return module.split(".")[1]


def wrong_ways(folder: str, module: str, source: str) -> list[str]:
    """Return the imports of a module that go against the order of its folder's parts."""
    order, part = ORDER[folder], part_of(module)
    return [
        f"{module} imports {other}"
        for other, _ in imported(source)
        if other.split(".")[0] == folder
        and part_of(other) != part
        and order.index(part_of(other)) > order.index(part)
    ]


@pytest.mark.parametrize("folder", sorted(ORDER))
def test_the_parts_of_a_process_import_in_the_order_of_the_table(folder: str) -> None:
    modules = {
        name: path
        for name, path in MODULES.items()
        if name.startswith(f"{folder}.") and part_of(name) not in ("__init__", "__main__")
    }
    assert set(map(part_of, modules)) == set(ORDER[folder])
    broken = [wrong_ways(folder, name, path.read_text()) for name, path in modules.items()]
    assert list(chain.from_iterable(broken)) == []


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return a circle of a graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {
        name: {
            other
            for other, for_types in imported(path.read_text())
            if not for_types and other != name
        }
        for name, path in MODULES.items()
    }
    assert circle_in(graph) == []


def test_the_checks_find_wrong_ways_and_circles() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from api_server import app\n"
    assert wrong_ways("api_server", "api_server.http.access", source) == [
        "api_server.http.access imports api_server.app"
    ]
    assert list(imported("def f():\n    from proto import codec\n")) == [("proto.codec", False)]
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circle_in({"a": {"b"}, "b": {"c"}})
