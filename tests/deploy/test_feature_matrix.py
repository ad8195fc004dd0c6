"""Each pair of features works with a test, or is refused by name; the document says which."""

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

from proto.errors import TokendError
from tests.feature_matrix import (
    ENTRIES,
    FEATURES,
    PAGE,
    Cell,
    Refused,
    Works,
    cells,
    with_current_table,
)

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
LEAST_CHARACTERS = 8
"""Of a string in a test that says which message it expects."""
LEAST_OF_A_MESSAGE = 20
"""Characters that a string of the code shares with a message that comes from it."""

REFUSALS = [cell for _, _, cell in ENTRIES if isinstance(cell, Refused)]


@cache
def functions_of(path: Path) -> dict[str, ast.AST]:
    return {
        node.name: node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def find(test: str) -> ast.AST | None:
    """Return the function of a test with its decorators; None if it does not exist."""
    path, _, name = test.partition("::")
    file = TESTS / path
    return functions_of(file).get(name) if file.is_file() and name.startswith("test_") else None


def named_by(cell: Cell) -> list[str]:
    if isinstance(cell, Works):
        return [cell.test]
    return [each for each in (cell.test, cell.rest) if each] if isinstance(cell, Refused) else []


def expects(test: str, message: str) -> bool:
    """Return whether a string of a test is a part of the message, or a pattern found in it."""
    function = find(test)
    assert function is not None
    for node in ast.walk(function):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and len(text) >= LEAST_CHARACTERS:
            try:
                if text in message or re.search(text, message):
                    return True
            except re.error:
                continue
    return False


@cache
def texts_of_the_code() -> list[list[str]]:
    """Return the strings of engine and worker; of a formatted one the parts that are fixed."""
    found = []
    for path in (*(ROOT / "engine_core").rglob("*.py"), *(ROOT / "worker").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        formatted = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for values in formatted for part in values}
        whole = [[node] for node in nodes if id(node) not in inside]
        for values in [*formatted, *whole]:
            parts = [part.value for part in values if isinstance(part, ast.Constant)]
            texts = [part for part in parts if isinstance(part, str)]
            if sum(map(len, texts)) >= LEAST_OF_A_MESSAGE:
                found.append(texts)
    return found


def comes_from_the_code(message: str) -> bool:
    """Return whether a string of the code, with what it formats, is a part of the message."""
    for texts in texts_of_the_code():
        place = 0
        for text in texts:
            place = message.find(text, place)
            if place < 0:
                break
        else:
            return True
    return False


def test_each_pair_has_one_entry() -> None:
    named = {name for some, others, _ in ENTRIES for name in (*some.split(), *others.split())}
    assert named <= FEATURES.keys()
    found = cells()
    pairs = list(itertools.combinations(FEATURES, 2))
    assert [pair for pair in pairs if pair not in found] == [], "no entry"
    assert [pair for pair in found if len(found[pair]) > 1] == [], "two entries"
    assert found.keys() == set(pairs), "a feature with itself"


def test_the_tests_exist() -> None:
    tests = {test for _, _, cell in ENTRIES for test in named_by(cell)}
    assert sorted(test for test in tests if find(test) is None) == []


@pytest.mark.parametrize("cell", REFUSALS, ids=lambda cell: cell.message[:60])
def test_a_refusal_has_the_message_of_the_code(cell: Refused) -> None:
    if cell.run is None:
        assert expects(cell.test, cell.message)
        assert comes_from_the_code(cell.message)
        return
    with pytest.raises(TokendError) as refusal:
        cell.run()
    assert str(refusal.value) == cell.message


def test_what_a_refusal_leaves_is_shown_by_a_test() -> None:
    partly = [cell for cell in REFUSALS if cell.part]
    assert partly
    assert all(cell.rest for cell in partly)


def test_the_table_is_current() -> None:
    """To update it: python -m tests.feature_matrix."""
    text = PAGE.read_text()
    assert with_current_table(text) == text
