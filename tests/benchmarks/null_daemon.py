"""A daemon without a model.

All processes are real except the worker, which answers every step with made-up tokens after N
milliseconds.
"""

import os
import sys
from collections.abc import Sequence

from deploy.bench.options import BenchParser
from deploy.cli import serve_with
from deploy.environment import HostEnvironment
from deploy.supervisor.launch import Commands
from deploy.supervisor.processes import module_commands
from tests.benchmarks.command import from_zero_number, run
from tests.benchmarks.line_program import ROOT

NULL_DAEMON = (sys.executable, "-m", "tests.benchmarks.null_daemon")
"""The command; the working directory must be the repository's root."""


def commands(words: Sequence[str]) -> tuple[Commands, list[str]]:
    """Return the commands of the daemon's processes, and the flags of `tokend serve` in words."""
    parser = BenchParser(prog="null_daemon", add_help=False, allow_abbrev=False)
    parser.add_argument("--step-ms", type=from_zero_number, default=0.0)
    options, flags = parser.parse_known_args(words)
    worker = (sys.executable, "-P", "-m", "tests.benchmarks.null_worker", "--step-ms")
    return {**module_commands(), "worker": (*worker, str(options.step_ms))}, flags


def main(words: Sequence[str]) -> int:
    """Serve until stopped. Return the exit status."""
    os.environ["PYTHONPATH"] = str(ROOT)
    processes, flags = commands(words)
    return serve_with(flags, HostEnvironment.of(os.environ), processes)


if __name__ == "__main__":
    sys.exit(run(main))
