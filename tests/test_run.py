"""The suite runner ends hanging tests and names them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import run
from tests.run import run_suite
from tests.suites import Suite

pytestmark = pytest.mark.suite("settings")

HANGING = """
import asyncio, subprocess, sys, time
import pytest

def test_before(): pass

@pytest.mark.timeout(0)
def test_that_hangs():
    orphan = [sys.executable, "-c", "import time; time.sleep(99)", "tokend-test-orphan"]
    subprocess.Popen(orphan)
    time.sleep(7)  # the run is being ended
    subprocess.Popen(orphan)
    time.sleep(99)

async def waits_for_an_event():
    await asyncio.Event().wait()

@pytest.mark.timeout(1)
async def test_that_waits():
    await waits_for_an_event()
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """A suite of three tests: one passes, one hangs in a call, one in an event loop."""
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGING)
    return Suite("quick", "nothing", 60, 4, paths=(str(file),), processes=1)


def options(*more: str) -> list[str]:
    return [
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        str(run.ROOT / "pyproject.toml"),
        *more,
    ]


def test_a_run_without_progress_is_ended_with_its_children_and_names_the_test(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "STALL_SECONDS", 5.0)
    monkeypatch.setattr(run, "INTERRUPT_SECONDS", 5.0)
    started = time.monotonic()
    outcome = run_suite(suite, options("-k", "before or hangs"))
    assert time.monotonic() - started < 40
    assert not outcome.ok
    assert "no test has started or ended for 5 s" in outcome.error
    assert "test_that_hangs" in outcome.error
    assert "test_before" not in outcome.error
    found = subprocess.run(["pgrep", "-f", "tokend-test-orphan"], capture_output=True, text=True)
    assert found.stdout == ""


def test_a_test_at_its_time_limit_shows_the_stacks_of_its_tasks(suite: Suite) -> None:
    command = [*suite.command(Path("/dev/null"), options("-k", "waits"))]
    ran = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "no end after 1 s" in ran.stdout
    assert "in waits_for_an_event" in ran.stdout


def test_a_suite_without_tests_fails(suite: Suite) -> None:
    assert not run_suite(suite, options("-k", "no_such_test")).ok


def test_every_suite_can_be_run_by_name() -> None:
    names = [suite.name for suite in run.SUITES]
    assert len(set(names)) == len(names)
    for suite in run.SUITES:
        assert set(suite.select) <= set(names)
        for path in suite.paths:
            assert (run.ROOT / path).exists(), path
    table = run.README.read_text()
    assert [name for name in names if f"| `{name}` |" not in table] == []


def test_help_lists_the_suites() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.run", "nonsense"],
        cwd=run.ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "chaos" in ran.stderr


def test_the_summary_names_the_files_that_took_long(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    cases = [("tests.long", 40.2), ("tests.long", 40.1), ("tests.short", 2.0)]
    lines = (f'<testcase classname="{name}" name="t" time="{time}"/>' for name, time in cases)
    junit.write_text(f"<testsuite>{''.join(lines)}</testsuite>")
    text = run.summary({"quick": run.read_junit(junit)})
    assert "    80 s in tests.long\n" in text
    assert "tests.short" not in text
