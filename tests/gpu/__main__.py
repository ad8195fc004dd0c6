"""`make gpu-check`: every phase in a process of its own; a table at the end, and JSON.

    python -m tests.gpu [--json FILE] [--only NAME ...]

A phase that fails, hangs or dies fails alone. What is left of the time limit of all is a
limit of each.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.phases import PHASES, TOTAL_SECONDS, Phase

NO_GPU = "make gpu-check needs an NVIDIA GPU that torch can use: {}"


def run_phase(phase: Phase, limit: float) -> dict[str, Any]:
    """Its figures or what went wrong, and the seconds that it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.one_phase", phase.function, str(file)],
            start_new_session=True,
        )
        try:
            status: Any = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"ended after {limit:.0f} s"
        answer: dict[str, Any] = (
            json.loads(file.read_text())
            if file.exists() and status == 0
            else {"error": f"the process failed: {status}"}
        )
    answer["seconds"] = time.monotonic() - started
    return answer


def run_all(phases: Sequence[Phase], total_seconds: float) -> dict[str, Any]:
    """The answers of all phases by name; those for which no time is left say so."""
    end = time.monotonic() + total_seconds
    answers: dict[str, Any] = {}
    for phase in phases:
        left = end - time.monotonic()
        if left <= 0:
            answers[phase.name] = {"error": "not run: no time was left", "seconds": 0.0}
            continue
        print(f"== {phase.name}", flush=True)
        answers[phase.name] = run_phase(phase, min(phase.seconds, left))
    return answers


def table(answers: dict[str, Any]) -> str:
    """A line for each phase, its figures under it."""
    lines = []
    for name, answer in answers.items():
        error, figures = answer.get("error"), answer.get("figures", {})
        missed = figures.get("missed")
        verdict = "FAILED" if error else "target missed" if missed else "ok"
        lines.append(f"{name:18} {verdict:14} {answer['seconds']:6.1f} s")
        if error:
            lines += [f"    {line}" for line in error.strip().splitlines()[-3:]]
        lines += [f"    {key:28} {_shown(value)}" for key, value in figures.items()]
    return "\n".join(lines)


def succeeded(answers: dict[str, Any]) -> bool:
    """Whether no phase failed and no target was missed."""
    return not any(
        "error" in answer or answer.get("figures", {}).get("missed") for answer in answers.values()
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "nothing"
    return str(value)


def refusal() -> str | None:
    """Why nothing can be checked here."""
    import torch

    if torch.cuda.is_available():
        return None
    built = torch.version.cuda
    return NO_GPU.format("none was found" if built else f"torch {torch.__version__} has no CUDA")


def main(words: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--only", nargs="*", choices=[each.name for each in PHASES], default=None)
    options = parser.parse_args(words)
    reason = refusal()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    chosen = [each for each in PHASES if options.only is None or each.name in options.only]
    answers = run_all(chosen, TOTAL_SECONDS)
    options.json.write_text(json.dumps(answers, indent=1))
    print(table(answers))
    return 0 if succeeded(answers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
