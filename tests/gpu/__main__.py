"""`make gpu-check`: run every phase in a process of its own; a table and JSON after every phase.

    python -m tests.gpu [--json FILE] [--only NAME ... | --part a] [--seconds N]

Needs neither pip, network nor the command `tokend`. A phase that fails, hangs or dies fails alone
and keeps its figures so far. Exit status 0: no phase failed and no target was missed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.gpu.hardware import REHEARSAL, rehearsing
from tests.gpu.phases import FIRST_HOUR, PHASES, Phase
from tests.gpu.process_tree import TERMINATED, TIMED_OUT
from tests.gpu.report import shown

REHEARSAL_STRETCH: Final = 10
"""Of all limits: imports alone may take longer on a busy host than a phase on a GPU."""
NO_GPU = "make gpu-check needs an NVIDIA GPU that torch can use: {}"
ROOT: Final = Path(__file__).parents[2]


class Terminated(BaseException):
    """SIGTERM has reached this process."""


def _terminate(*_: Any) -> None:
    raise Terminated


def run_phase(phase: Phase, limit: float) -> dict[str, Any]:
    """Run a phase; returns its figures, errors and duration in seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        work = [sys.executable, "-u", "-m", "tests.gpu.one_phase", phase.function, str(file)]
        tree = [sys.executable, "-m", "tests.gpu.process_tree", str(limit), *work]
        process = subprocess.Popen(tree, start_new_session=True, cwd=ROOT, env=environment())
        try:
            status = process.wait()
        except (Terminated, KeyboardInterrupt):
            process.terminate()
            process.wait()
            status = TERMINATED
        answer: dict[str, Any] = {"figures": {}, "missed": [], "errors": []}
        if file.exists():
            answer = json.loads(file.read_text())
    if status:
        reasons = {TIMED_OUT: f"ended after {limit:.0f} s", TERMINATED: "this check was ended"}
        answer["errors"].append(reasons.get(status, f"the process failed: {status}"))
    answer["seconds"] = time.monotonic() - started
    if status == TERMINATED:
        answer["terminated"] = True
    return answer


def environment() -> dict[str, str]:
    """The environment of phases: modules of this checkout are importable, output is unbuffered."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run_all(
    phases: Sequence[Phase],
    total_seconds: float,
    after_each: Callable[[dict[str, Any]], None] = lambda answers: None,
) -> dict[str, Any]:
    """Run phases; returns their results by name, with a note for phases without time left.

    after_each: called with all results so far.
    """
    end = time.monotonic() + total_seconds
    answers: dict[str, Any] = {}
    reason = "not run: no time was left"
    for phase in phases:
        left = end - time.monotonic()
        if left <= 0:
            answers[phase.name] = {"errors": [reason], "seconds": 0.0}
            after_each(answers)
            continue
        print(f"== {phase.name}", flush=True)
        answers[phase.name] = run_phase(phase, min(phase.seconds, left))
        after_each(answers)
        if answers[phase.name].get("terminated"):
            end, reason = time.monotonic(), "not run: this check was ended"
    return answers


def table(answers: dict[str, Any]) -> str:
    """Format a line for every phase, followed by its figures."""
    lines = []
    for name, answer in answers.items():
        errors, missed = answer.get("errors"), answer.get("missed", [])
        verdict = "FAILED" if errors else "target missed" if missed else "ok"
        lines.append(f"{name:18} {verdict:14} {answer['seconds']:6.1f} s")
        for error in errors or []:
            lines += [f"    {line}" for line in error.strip().splitlines()[-3:]]
        lines += [f"    target missed: {each}" for each in missed]
        lines += [
            f"    {key:32} {shown(value)}" for key, value in answer.get("figures", {}).items()
        ]
    return "\n".join(lines)


def succeeded(answers: dict[str, Any]) -> bool:
    """Whether no phase failed and no target was missed."""
    return not any(answer.get("errors") or answer.get("missed") for answer in answers.values())


def refusal() -> str | None:
    """Why this machine cannot be checked, or None."""
    if rehearsing():
        return None
    import torch

    if torch.cuda.is_available():
        return None
    built = torch.version.cuda
    return NO_GPU.format("none was found" if built else f"torch {torch.__version__} has no CUDA")


def chosen(only: Sequence[str] | None, part: str | None) -> list[Phase]:
    """The phases that the flags name, in their order; all of them without flags."""
    names = FIRST_HOUR[part] if part else only
    return [each for each in PHASES if names is None or each.name in names]


def main(words: Sequence[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--only", nargs="+", choices=[each.name for each in PHASES])
    parser.add_argument("--part", choices=FIRST_HOUR, help="what a command of first_hour.sh runs")
    parser.add_argument("--seconds", type=float, help="for all phases; by default their own limits")
    parser.add_argument(
        "--rehearse", action="store_true", help="small sizes on the strict fake, without a GPU"
    )
    options = parser.parse_args(words)
    if options.rehearse:
        os.environ[REHEARSAL] = "1"
    reason = refusal()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _terminate)
    stretch = REHEARSAL_STRETCH if rehearsing() else 1
    phases = [
        each._replace(seconds=stretch * each.seconds) for each in chosen(options.only, options.part)
    ]

    def keep(answers: dict[str, Any]) -> None:
        options.json.write_text(json.dumps(answers, indent=1))
        print(table(dict([list(answers.items())[-1]])), flush=True)

    total = stretch * options.seconds if options.seconds else sum(p.seconds for p in phases)
    answers = run_all(phases, total, keep)
    print(f"== all\n{table(answers)}", flush=True)
    return 0 if succeeded(answers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
