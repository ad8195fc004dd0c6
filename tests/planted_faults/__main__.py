"""Plant faults one at a time in copies of the tree and report which test finds each.

unmodified copy ─ control: the tests of all faults must pass ─▶ for each fault
copy with the fault ─ its own tests ─ found? ─ else the rest of the suite ─▶ table
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.planted_faults.faults import FAULTS, Fault
from tests.planted_faults.suites import NO_END, SUITES, Outcome, Stage, run_stage
from tests.planted_faults.tree_copy import (
    SetupError,
    TreeCopy,
    adopt_orphans,
    copy_with_fault,
    copy_working_tree,
    end_descendants,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result for one fault.

    test: the first test that failed, empty if none did. seconds: duration of all its runs.
    """

    fault: str
    harm: str
    stage: str
    test: str
    seconds: float


class Session:
    """The copies and logs of one command.

    own_only: run only the tests listed for a fault. limit_seconds: for all tests of a fault.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        work: Path,
        logs: Path,
        limit_seconds: float,
        own_only: bool,
    ) -> None:
        self._stages = stages
        self._work = work
        self._logs = logs
        self._limit_seconds = limit_seconds
        self._own_only = own_only
        self._base = copy_working_tree(work / "base")

    def control(self, faults: Sequence[Fault]) -> list[str]:
        """Return the tests listed for the faults that fail on the unmodified copy."""
        paths = sorted({path for fault in faults for path in fault.tests})
        failed: list[str] = []
        for stage in self._stages:
            print(f"control: {stage.name} tests of {len(paths)} files and folders", flush=True)
            log = self._logs / "control.log"
            outcome = self._run(self._base, stage, paths, self._limit_seconds, log)
            failed += outcome.failed
        return failed

    def confirmed(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings, without tests that fail on the unmodified copy as well."""
        failed: set[str] = set()
        for stage in self._stages:
            tests = {_test_id(each) for each in findings if each.stage == stage.name}
            if tests:
                log = self._logs / "control.log"
                limit = self._limit_seconds * len(tests)
                outcome = self._run(self._base, stage, sorted(tests), limit, log)
                failed.update(outcome.failed)
        for test in sorted(failed):
            print(f"fails without a fault, too: {test}", file=sys.stderr, flush=True)
        return [replace(each, test="") if _test_id(each) in failed else each for each in findings]

    def try_fault(self, fault: Fault) -> Finding:
        """Plant a fault and run tests until one fails."""
        with tempfile.TemporaryDirectory(prefix="f", dir=self._work) as folder:
            try:
                copy = copy_with_fault(self._base, fault, Path(folder))
                return self._find(copy, fault)
            except SetupError as error:  # the other faults can still be tried
                print(f"{fault.name}: {error}", file=sys.stderr, flush=True)
                return Finding(fault.name, fault.harm, "", "", 0.0)

    def _find(self, copy: TreeCopy, fault: Fault) -> Finding:
        log = self._logs / f"{fault.name}.log"
        rest = [f"--ignore={path}" for path in fault.tests]
        seconds = 0.0
        for paths, options in ((fault.tests, ()), ((), rest)):
            if self._own_only and not paths:
                break
            for stage in self._stages:
                left = max(1.0, self._limit_seconds - seconds)
                outcome = self._run(copy, stage, paths, left, log, ("-x", *options))
                seconds += outcome.seconds
                if outcome.failed and (paths or self._passes_without(stage, outcome.failed[0])):
                    test = outcome.failed[0]
                    return Finding(fault.name, fault.harm, stage.name, test, seconds)
        return Finding(fault.name, fault.harm, "", "", seconds)

    def _passes_without(self, stage: Stage, test: str) -> bool:
        """Return whether a test passes on the unmodified copy.

        The search in the rest of a suite must not end at a test that always fails.
        """
        log = self._logs / "control.log"
        test = test.removesuffix(NO_END)
        return self._run(self._base, stage, [test], self._limit_seconds, log).passed

    def _run(
        self,
        copy: TreeCopy,
        stage: Stage,
        paths: Sequence[str],
        limit_seconds: float,
        log: Path,
        options: Sequence[str] = (),
    ) -> Outcome:
        """Call `run_stage`, then kill every process that its tests left behind."""
        try:
            outcome = run_stage(copy, stage, paths, limit_seconds, log, options, reaps_orphans=True)
        finally:
            end_descendants()
        if outcome.broken:
            lines = log.read_text(errors="replace").splitlines()[-15:]
            raise SetupError("\n".join(["pytest could not run:", *lines]))
        return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if enough faults were found, 1 if not, 2 if the setup is broken."""
    options = _parser().parse_args(arguments)
    known = {fault.name: fault for fault in FAULTS}
    unknown = sorted(set(options.only) - known.keys())
    if unknown:
        print(f"no such fault: {', '.join(unknown)}", file=sys.stderr)
        return 2
    faults = [known[name] for name in options.only] or list(FAULTS)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):  # the cleanup below runs for both
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pf") as work:
        logs = options.logs or Path(work)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            session = Session(
                SUITES[options.suite], Path(work), logs, options.limit, options.own_tests_only
            )
            if options.control:
                failed = session.control(faults)
                print(*(f"fails without a fault: {test}" for test in failed), sep="\n")
                return 2 if failed else 0
            findings = session.confirmed(_try_all(session, faults, options.json))
        except SetupError as error:
            print(f"broken setup: {error}", file=sys.stderr)
            return 2
    _write(findings, options.json)
    num_found = sum(bool(each.test) for each in findings)
    print(*_table(findings), sep="\n")
    print(f"\n{num_found} of {len(findings)} faults found")
    wanted = len(findings) if options.at_least is None else options.at_least
    return 0 if num_found >= wanted else 1


def _try_all(session: Session, faults: Sequence[Fault], file: Path | None) -> list[Finding]:
    findings: list[Finding] = []
    for number, fault in enumerate(faults, 1):
        finding = session.try_fault(fault)
        findings.append(finding)
        _write(findings, file)
        found = finding.test or "NOT FOUND"
        print(f"{number}/{len(faults)} {fault.name}: {found} ({finding.seconds:.0f} s)", flush=True)
    return findings


def _write(findings: Sequence[Finding], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps([asdict(each) for each in findings], indent=1) + "\n")


def _test_id(finding: Finding) -> str:
    return finding.test.removesuffix(NO_END)


def _table(findings: Sequence[Finding]) -> list[str]:
    """Return the lines of a Markdown table."""
    rows = ["| fault | what a user sees | found by | suite | s |", "|---|---|---|---|---|"]
    for each in findings:
        test = f"`{each.test.removeprefix('tests/')}`" if each.test else "**nothing**"
        rows.append(f"| {each.fault} | {each.harm} | {test} | {each.stage} | {each.seconds:.0f} |")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.planted_faults", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="these faults instead of all")
    add("--suite", choices=list(SUITES), default="test", help="the tests that may find a fault")
    add("--own-tests-only", action="store_true", help="not the rest of the suite")
    add("--control", action="store_true", help="run the faults' own tests without any fault")
    add("--limit", type=float, default=3600.0, metavar="SECONDS", help="for the tests of a fault")
    add("--at-least", type=int, metavar="N", help="faults to be found; default: all")
    add("--json", type=Path, metavar="FILE", help="write the findings there")
    add("--logs", type=Path, metavar="FOLDER", help="keep the output of pytest there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
