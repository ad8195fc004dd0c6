"""Running pytest on a copy of the tree, and parsing its output."""

from pathlib import Path

import pytest

from tests.planted_faults.suites import QUICK, Outcome, outcome_of, run_stage
from tests.planted_faults.tree_copy import SetupError, TreeCopy, make_python

SELECTION = """
def pytest_addoption(parser):
    parser.addoption("--suite")

def pytest_configure(config):
    config.addinivalue_line("markers", "suite(name)")

def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if not item.get_closest_marker("suite")]
"""
TESTS = """
import pytest

def test_passes(): pass

@pytest.mark.parametrize("text", ["with blanks - and a dash"])
def test_fails(text): assert not text

@pytest.mark.suite("daemons")
def test_is_slow(): raise RuntimeError

@pytest.fixture
def broken(): raise RuntimeError

def test_has_an_error(broken): pass
"""


HANGING_OUTPUT = """
tests/test_it.py::test_passes PASSED                                     [ 33%]
tests/test_it.py::test_fails[with blanks] FAILED                         [ 66%]
tests/test_it.py::test_takes_long[with blanks] """
XDIST_OUTPUT = """
[gw1] [ 48%] PASSED tests/test_it.py::test_passes
[gw0] [ 49%] FAILED tests/test_it.py::test_fails[with blanks]
FAILED tests/test_it.py::test_fails[with blanks] - assert not 'with blanks'
"""


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TreeCopy:
    """A tree with a single test file."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take seconds to import
    copy = TreeCopy(tmp_path)
    (copy.root / "tests").mkdir(parents=True)
    (copy.root / "pytest.ini").write_text("[pytest]")
    (copy.root / "conftest.py").write_text(SELECTION)
    (copy.root / "tests" / "test_it.py").write_text(TESTS)
    make_python(copy)
    return copy


def run(copy: TreeCopy, *options: str) -> Outcome:
    return run_stage(copy, QUICK, ["tests/test_it.py"], 600.0, copy.folder / "log", options)


def test_failed_tests_are_named(copy: TreeCopy) -> None:
    outcome = run(copy)
    assert outcome.failed == (
        "tests/test_it.py::test_fails[with blanks - and a dash]",
        "tests/test_it.py::test_has_an_error",
    )
    assert run(copy, "-k", "passes").passed


def test_failed_tests_under_xdist_are_named() -> None:
    assert outcome_of(XDIST_OUTPUT, 2, 1.0).failed == ("tests/test_it.py::test_fails[with blanks]",)


def test_a_test_that_does_not_end_is_named() -> None:
    assert outcome_of(HANGING_OUTPUT, None, 1.0).failed == (
        "tests/test_it.py::test_fails[with blanks]",
        "tests/test_it.py::test_takes_long[with blanks] (no end)",
    )


def test_an_empty_selection_passes() -> None:
    assert outcome_of("", 5, 1.0).passed


def test_a_file_that_cannot_be_imported_is_named(copy: TreeCopy) -> None:
    (copy.root / "tests" / "test_it.py").write_text("import nothing_of_that_name")
    assert run(copy).failed == ("tests/test_it.py",)


def test_a_run_that_fails_without_a_failed_test_is_broken(copy: TreeCopy) -> None:
    outcome = run(copy, "--no-such-option")
    assert outcome.broken
    assert not outcome.passed


def test_a_copy_that_imports_from_another_tree_is_refused(copy: TreeCopy) -> None:
    with pytest.raises(SetupError, match="instead of"):
        copy.check_imports()
