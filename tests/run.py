"""Run the test suites by name, each within its own time limit.

    python -m tests.run test             what `make test` runs
    python -m tests.run all              every suite but `peers`
    python -m tests.run quick chaos      suites by name
    python -m tests.run all --table      the same, and write the table of tests/README.md

A test belongs to the suite that its marker names, `pytest.mark.suite("chaos")`; without one to
`engine` in tests/engine_core, to `bench` in tests/benchmarks and to `quick` elsewhere. Each suite
is one pytest process tree. It ends when its time limit has passed, or when no test has started or
ended for STALL_SECONDS, or for the limit of a single test if that is longer; the tests that were
running are then printed by name. A single test that exceeds the limit for tests of its suite fails
with the stacks of all threads and asyncio tasks (see tests/conftest.py).
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil

from tests.suites import SUITES, Suite

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "tests" / "README.md"
TABLE_HEAD = "| suite | guards | tests | minutes |\n|---|---|---|---|\n"
STALL_SECONDS = 300.0
"""Least of them; longer than the limit of any single test of what `make test` runs."""
POLL_SECONDS = 0.5
NUM_LONGEST = 3
"""Files of a suite that the summary names, if their tests took more than LONG_SECONDS together."""
LONG_SECONDS = 60
INTERRUPT_SECONDS = 20.0
"""How long pytest may take to report when it is ended early."""


@dataclass
class Outcome:
    """The result of a suite.

    seconds_by_file: of the tests of each file. error: why it was ended early, or empty.
    """

    seconds: float
    counts: Counter[str]
    failed: list[str]
    skip_reasons: Counter[str]
    seconds_by_file: Counter[str] = field(default_factory=Counter)
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and not self.failed and self.counts["passed"] > 0


def run_suite(suite: Suite, options: Sequence[str] = ()) -> Outcome:
    """Run one suite to its end or its limit, with its output on this terminal."""
    print(f"== {suite.name}: {suite.guards}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokend-tests-") as folder:
        junit, progress = Path(folder, "junit.xml"), Path(folder, "progress")
        progress.touch()
        process = subprocess.Popen(
            suite.command(junit, options),
            cwd=ROOT,
            env={**os.environ, **suite.environment, "TOKEND_TEST_PROGRESS": str(progress)},
            start_new_session=True,
        )
        stall = STALL_SECONDS
        if suite.seconds_per_test >= stall:  # pytest ends such a test first
            stall = suite.seconds_per_test + INTERRUPT_SECONDS
        error = wait_for(process, progress, suite.seconds, stall)
        if error:
            print(f"{suite.name}: {error}", flush=True)
        outcome = read_junit(junit)
        outcome.seconds = time.monotonic() - started
        outcome.error = error
        if not error and process.returncode not in (0, 1):
            outcome.error = f"pytest ended with status {process.returncode}"
    return outcome


def wait_for(process: "subprocess.Popen[bytes]", progress: Path, limit: float, stall: float) -> str:
    """Wait until pytest ends; end its process tree at a limit and return the reason.

    limit: seconds in all. stall: seconds in which no test starts or ends.
    """
    started = changed = time.monotonic()
    size = 0
    try:
        while process.poll() is None:
            now = time.monotonic()
            if progress.stat().st_size != size:
                size, changed = progress.stat().st_size, now
            if now - started > limit:
                return end_tree(process, f"the limit of {limit:.0f} s has passed", progress)
            if now - changed > stall:
                reason = f"no test has started or ended for {stall:.0f} s"
                return end_tree(process, reason, progress)
            time.sleep(POLL_SECONDS)
    except BaseException:
        end_tree(process, "interrupted", progress)
        raise
    return ""


def end_tree(process: "subprocess.Popen[bytes]", reason: str, progress: Path) -> str:
    """Kill pytest, its workers and the daemons that they started; name the running tests."""
    running = running_tests(progress.read_text())
    pytest_process = psutil.Process(process.pid)
    family = pytest_process.children(recursive=True)
    process.send_signal(signal.SIGINT)  # pytest then shows the failures that it has seen
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(INTERRUPT_SECONDS)
    # Until then its workers go on with their tests, and may have started further daemons.
    for member in [pytest_process, *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += member.children(recursive=True)
    for member in [*family, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    return f"ended: {reason}; running: {', '.join(running) or 'no test'}"


def running_tests(progress: str) -> list[str]:
    """The tests that have started and not ended. progress: lines of `start ID` and `end ID`."""
    running: dict[str, None] = {}
    for line in progress.splitlines():
        event, _, test = line.partition(" ")
        if event == "start":
            running[test] = None
        else:
            running.pop(test, None)
    return list(running)


def read_junit(file: Path) -> Outcome:
    """The counts of a run from pytest's XML report; no counts where there is none."""
    outcome = Outcome(0.0, Counter(), [], Counter())
    if not file.exists():
        return outcome
    for case in ElementTree.parse(file).iter("testcase"):
        result = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                result = "failed"
            elif child.tag == "skipped":
                result = "skipped"
                outcome.skip_reasons[child.get("message", "")] += 1
        outcome.counts[result] += 1
        name = case.get("classname", "")
        outcome.seconds_by_file[name] += round(float(case.get("time", 0)))
        if result == "failed":
            outcome.failed.append(f"{case.get('classname')}::{case.get('name')}")
    return outcome


def summary(outcomes: dict[str, Outcome]) -> str:
    """A line for each suite, its longest files, why tests were skipped, and the counts of all."""
    lines, total = [""], Counter[str]()
    for name, outcome in outcomes.items():
        total.update(outcome.counts)
        verdict = "ok" if outcome.ok else outcome.error or "FAILED"
        counts = ", ".join(f"{number} {what}" for what, number in outcome.counts.items())
        lines.append(f"{name:12} {outcome.seconds:6.0f} s  {counts or 'no tests'}: {verdict}")
        longest = outcome.seconds_by_file.most_common(NUM_LONGEST)
        lines += [
            f"    {seconds} s in {file}" for file, seconds in longest if seconds > LONG_SECONDS
        ]
        lines += [f"    failed: {test}" for test in outcome.failed]
        lines += [f"    {n} skipped: {why}" for why, n in outcome.skip_reasons.most_common()]
    failed = total["failed"] + sum(bool(each.error) for each in outcomes.values())
    lines.append(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return "\n".join(lines)


def write_table(outcomes: dict[str, Outcome]) -> None:
    """Replace the rows of tests/README.md whose suites have just run."""
    text = README.read_text()
    head, rows, tail = re.split(r"<!-- suites -->\n", text)
    known = {row.split("|")[1].strip(" `"): row for row in rows.splitlines()[2:]}
    for suite in SUITES:
        outcome = outcomes.get(suite.name)
        if outcome is not None and outcome.ok:
            cells = f"`{suite.name}`", suite.guards, outcome.counts["passed"], outcome.seconds / 60
            known[suite.name] = "| {} | {} | {} | {:.1f} |".format(*cells)
    ordered = [known[suite.name] for suite in SUITES if suite.name in known]
    rows = TABLE_HEAD + "\n".join(ordered) + "\n"
    README.write_text("<!-- suites -->\n".join([head, rows, tail]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__.split("\n")[0])
    names = [suite.name for suite in SUITES]
    parser.add_argument("suites", nargs="+", choices=["test", "all", *names], metavar="SUITE")
    parser.add_argument("--table", action="store_true", help="write the table of tests/README.md")
    parsed, options = parser.parse_known_args(arguments)
    chosen = [
        suite
        for suite in SUITES
        if suite.name in parsed.suites
        or ("all" in parsed.suites and suite.in_all)
        or ("test" in parsed.suites and suite.in_test)
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the suite as Ctrl-C does
    outcomes = {suite.name: run_suite(suite, options) for suite in chosen}
    print(summary(outcomes), flush=True)
    if parsed.table:
        write_table(outcomes)
    return 0 if all(outcome.ok for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
