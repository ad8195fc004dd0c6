"""`make gpu-check`: run every phase in a process of its own; a table and JSON after every phase.

    python -m tests.gpu [--json FILE] [--only NAME ... | --hour] [--seconds N]

Needs neither pip, network nor the command `tokend`. A phase that fails, hangs or dies fails alone
and keeps its figures so far. With --hour phases that the file has are not run again, and those for
which the command has no time are left to the next one. Exit status 0: no phase failed and no
target was missed; 3: phases are left.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tests.gpu.hardware import REHEARSAL, rehearsing
from tests.gpu.phases import COMMAND_SECONDS, PHASES, Phase
from tests.gpu.process_tree import TERMINATED, TIMED_OUT
from tests.gpu.report import STATE, shown

CUT_OFF: Final = "the command was ended while it ran"
REHEARSAL_STRETCH: Final = 10
"""Of all limits: imports alone may take longer on a busy host than a phase on a GPU."""
LEFT: Final = 3
"""Exit status while phases of the hour are left."""
NO_GPU = "make gpu-check needs an NVIDIA GPU that torch can use: {}"
ROOT: Final = Path(__file__).parents[2]


class Terminated(BaseException):
    """SIGTERM has reached this process."""


def _terminate(*_: Any) -> None:
    raise Terminated


def run_phase(phase: Phase, limit: float, folder: Path) -> dict[str, Any]:
    """Run a phase; returns its figures, errors and duration in seconds.

    folder: has them in NAME.json at once, also if nothing ends this process properly.
    """
    started = time.monotonic()
    file = (folder / f"{phase.name}.json").resolve()
    work = [sys.executable, "-u", "-m", "tests.gpu.one_phase", phase.function, str(file)]
    tree = [sys.executable, "-m", "tests.gpu.process_tree", str(limit), *work]
    process = subprocess.Popen(tree, start_new_session=True, cwd=ROOT, env=environment())
    try:
        status = process.wait()
    except (Terminated, KeyboardInterrupt):
        process.terminate()
        process.wait()
        status = TERMINATED
    answer = figures_of(folder, phase.name)
    if status:
        reasons = {TIMED_OUT: f"ended after {limit:.0f} s", TERMINATED: "this check was ended"}
        answer["errors"].append(reasons.get(status, f"the process failed: {status}"))
    answer["seconds"] = time.monotonic() - started
    if status == TERMINATED:
        answer["terminated"] = True
    return answer


def figures_of(folder: Path, name: str) -> dict[str, Any]:
    """Return what a phase has written so far."""
    file = folder / f"{name}.json"
    answer: dict[str, Any] = {"figures": {}, "missed": [], "errors": []}
    return json.loads(file.read_text()) if file.exists() else answer


def environment() -> dict[str, str]:
    """The environment of phases: modules of this checkout are importable, output is unbuffered."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run_all(
    phases: Sequence[Phase],
    total_seconds: float,
    after_each: Callable[[dict[str, Any]], None] = lambda answers: None,
    *,
    folder: Path,
    earlier: Mapping[str, Any] = MappingProxyType({}),
    postpones: bool = False,
) -> dict[str, Any]:
    """Run phases; returns their results by name, with a note for phases without time left.

    after_each: called with all results so far, those of a phase that begins included. folder: of
    figures. earlier: results of phases that are not run again. postpones: phases that might not end
    in time are left out.
    """
    end = time.monotonic() + total_seconds
    answers: dict[str, Any] = dict(earlier)
    reason = "not run: no time was left"
    for phase in phases:
        if phase.name in answers:
            continue
        left = end - time.monotonic()
        if postpones and left < phase.seconds:
            break
        if left <= 0:
            answers[phase.name] = {"errors": [reason], "seconds": 0.0}
            after_each(answers)
            continue
        print(f"== {phase.name}", flush=True)
        after_each(answers | {phase.name: {"errors": [CUT_OFF], "seconds": phase.seconds}})
        answers[phase.name] = run_phase(phase, min(phase.seconds, left), folder)
        after_each(answers)
        if answers[phase.name].get("terminated"):
            if postpones:
                break
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


def chosen(only: Sequence[str] | None, hour: bool) -> list[Phase]:
    """The phases that the flags name, in their order; all of them without flags."""
    if only is not None:
        return [each for each in PHASES if each.name in only]
    return [each for each in PHASES if each.in_hour or not hour]


def read_answers(file: Path, folder: Path) -> dict[str, Any]:
    """Return the results of earlier commands, also of a phase in which one was cut off."""
    if not file.exists():
        return {}
    answers: dict[str, Any] = json.loads(file.read_text())
    for name, answer in answers.items():
        if answer["errors"][-1:] == [CUT_OFF]:
            found = figures_of(folder, name)
            answers[name] = found | answer | {"errors": [*found["errors"], CUT_OFF]}
    return answers


def main(words: Sequence[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--only", nargs="+", choices=[each.name for each in PHASES])
    parser.add_argument("--hour", action="store_true", help="what a command of hour.sh runs")
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
        each._replace(seconds=stretch * each.seconds) for each in chosen(options.only, options.hour)
    ]
    folder = options.json.with_suffix(".d")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(STATE, str(folder.resolve()))
    earlier = read_answers(options.json, folder) if options.hour else {}
    for name in options.only or ():
        earlier.pop(name, None)

    def keep(answers: dict[str, Any]) -> None:
        new = options.json.with_suffix(".new")
        new.write_text(json.dumps(answers, indent=1))
        os.replace(new, options.json)
        name, last = list(answers.items())[-1]
        if last["errors"] != [CUT_OFF]:
            print(table({name: last}), flush=True)

    default = COMMAND_SECONDS * stretch if options.hour else sum(p.seconds for p in phases)
    total = stretch * options.seconds if options.seconds else default
    answers = run_all(phases, total, keep, folder=folder, earlier=earlier, postpones=options.hour)
    print(f"== all\n{table(answers)}", flush=True)
    left = [each.name for each in phases if each.name not in answers]
    if not left:
        for each in filter(Path.is_dir, folder.iterdir()):  # checkpoints that phases share
            shutil.rmtree(each)
    if left:
        print(f"left: {', '.join(left)}", flush=True)
        return LEFT
    return 0 if succeeded(answers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
