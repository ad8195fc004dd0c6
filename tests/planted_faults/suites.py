"""How the suites of tests/run.py are run on a copy of the tree."""

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
"""Exit status of pytest."""
NO_END: Final = " (no end)"
"""Behind the id of a test that did not end within the limit."""
REAP_SECONDS: Final = 0.05
INTERRUPT_SECONDS: Final = 30.0
"""How long an interrupted pytest may take to end its fixtures."""
_FAILED: Final = (
    re.compile(r"^(tests/.+) (?:FAILED|ERROR) +\[ *\d+%\]$", re.MULTILINE),
    re.compile(r"^\[gw\d+\] \[ *\d+%\] (?:FAILED|ERROR) (tests/.+?) *$", re.MULTILINE),
    re.compile(r"^ERROR (tests/\S+\.py)(?: - .*)?$", re.MULTILINE),
)
"""Lines of `pytest -v`: of a test, of one that xdist ran, of a file that cannot be collected."""
_STARTED: Final = re.compile(r"^(tests/\S+\.py::.*?) *(?:[A-Z]{4,} .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stage:
    """Suites that run together. whole: options of pytest where no files are named."""

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
"""By name: what `make test` runs, and what all suites run together."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run of pytest.

    failed: ids of the tests that failed; one that did not end within the limit is the last.
    broken: pytest failed, but no test did; the log says why.
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
    """Run the tests of a stage that are in `paths`, all of its tests if there are none.

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
                process.send_signal(signal.SIGINT)  # fixtures end their daemons
                _ends_within(process, INTERRUPT_SECONDS, reaps_orphans)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    seconds = time.monotonic() - begun
    output = log.read_bytes()[start:].decode(errors="replace")
    return outcome_of(output, process.returncode if ended else None, seconds)


def outcome_of(output: str, status: int | None, seconds: float) -> Outcome:
    """What pytest has written says. status: its exit status; None where it did not end in time."""
    failed = tuple(dict.fromkeys(chain.from_iterable(each.findall(output) for each in _FAILED)))
    if status is None:
        started = _STARTED.findall(output)
        failed = (*failed, (started[-1] if started else "no test") + NO_END)
    broken = status not in (0, NOTHING_COLLECTED) and not failed
    return Outcome(failed, seconds, broken)


def _ends_within(process: "subprocess.Popen[bytes]", seconds: float, reaps_orphans: bool) -> bool:
    """Wait for pytest; False if it takes longer.

    What its tests orphan is reaped meanwhile, as process 1 would do it elsewhere: a test that
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
