"""Run the suites of tests/suites.py on a copy of the tree."""

import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from deploy.supervisor.processes import reap_adopted
from tests import run
from tests.planted_faults.tree_copy import TreeCopy

NOTHING_COLLECTED: Final = 5
"""Exit status of pytest when it collected no test."""
NO_END: Final = " (no end)"
"""Suffix of the id of a test that did not end within the limit."""
REAP_SECONDS: Final = 0.05
INTERRUPT_SECONDS: Final = 30.0
"""Time limit for an interrupted pytest to tear down its fixtures."""
_FAILED: Final = (
    re.compile(r"^(tests/.+) (?:FAILED|ERROR) +\[ *\d+%\]$", re.MULTILINE),
    re.compile(r"^\[gw\d+\] \[ *\d+%\] (?:FAILED|ERROR) (tests/.+?) *$", re.MULTILINE),
    re.compile(r"^ERROR (tests/\S+\.py)(?: - .*)?$", re.MULTILINE),
)
"""Lines of `pytest -v` for a failed test, one run by xdist, and a file that cannot be collected."""
_STARTED: Final = re.compile(r"^(tests/\S+\.py::.*?) *(?:[A-Z]{4,} .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stage:
    """Suites that run together. whole: options of pytest when no files are named."""

    name: str
    suites: tuple[str, ...]
    whole: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


QUICK: Final = Stage(
    "quick", ("quick", "engine"), ("-n", "2", "--dist", "loadfile"), (("OMP_NUM_THREADS", "1"),)
)
DAEMONS: Final = Stage("daemons", ("daemons",), ("-n", "2", "--dist", "loadfile"))
FURTHER: Final = Stage("further", tuple(each.name for each in run.SUITES if not each.in_test))

SUITES: Final[Mapping[str, tuple[Stage, ...]]] = {
    "test": (QUICK, DAEMONS),
    "all": (QUICK, DAEMONS, FURTHER),
}
"""Stages by name: those of `make test`, and those of all suites."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run of pytest.

    failed: ids of the tests that failed; a test that did not end within the limit is last.
    broken: pytest failed although no test did; the log says why.
    """

    failed: tuple[str, ...]
    seconds: float
    broken: bool = False

    @property
    def passed(self) -> bool:
        return not self.failed and not self.broken


def run_stage(
    copy: TreeCopy,
    stage: Stage,
    paths: Sequence[str],
    limit_seconds: float,
    log: Path,
    options: Sequence[str] = (),
    *,
    reaps_orphans: bool = False,
) -> Outcome:
    """Run the tests of a stage that are in `paths`, or all its tests if `paths` is empty.

    reaps_orphans: this process has called `adopt_orphans` and has no other children.
    """
    command = [
        *(str(copy.python), "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"),
        *("--suite", ",".join(stage.suites), *(() if paths else stage.whole), *options, *paths),
    ]
    begun = time.monotonic()
    with log.open("ab") as stream:
        start = stream.tell()
        process = subprocess.Popen(
            command,
            cwd=copy.root,
            env=copy.environment | dict(stage.environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = False
        try:
            ended = _ends_within(process, limit_seconds, reaps_orphans)
            if not ended:
                process.send_signal(signal.SIGINT)  # lets fixtures end their daemons
                _ends_within(process, INTERRUPT_SECONDS, reaps_orphans)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    seconds = time.monotonic() - begun
    output = log.read_bytes()[start:].decode(errors="replace")
    return outcome_of(output, process.returncode if ended else None, seconds)


def outcome_of(output: str, status: int | None, seconds: float) -> Outcome:
    """Parse the output of pytest. status: its exit status, None if it reached the time limit."""
    failed = tuple(dict.fromkeys(chain.from_iterable(each.findall(output) for each in _FAILED)))
    if status is None:
        started = _STARTED.findall(output)
        failed = (*failed, (started[-1] if started else "no test") + NO_END)
    broken = status not in (0, NOTHING_COLLECTED) and not failed
    return Outcome(failed, seconds, broken)


def _ends_within(process: "subprocess.Popen[bytes]", seconds: float, reaps_orphans: bool) -> bool:
    """Wait for pytest; return False if it exceeds the time limit.

    Orphaned processes of its tests are reaped meanwhile, as process 1 does elsewhere: a test that
    waits for the end of a process waits until its exit status has been read.
    """
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        if reaps_orphans:
            reap_adopted({process.pid})
        time.sleep(REAP_SECONDS)
    return True
