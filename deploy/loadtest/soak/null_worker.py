"""How the processes of a daemon are started whose worker computes nothing."""

import sys
from collections.abc import Sequence

from deploy.child import Commands, module_commands
from deploy.loadtest.options import Parser, from_zero_number


def commands(words: Sequence[str]) -> tuple[Commands, list[str]]:
    """Everything real but the worker, which answers each step with made-up tokens.

    words: flags of `tokend bench null`. Of them the second one has those of `tokend serve`.
    """
    parser = Parser(prog="tokend bench null", add_help=False, allow_abbrev=False)
    parser.add_argument("--step-ms", type=from_zero_number, default=0.0)
    own, others = parser.parse_known_args(words)
    worker = (sys.executable, "-P", "-m", "engine_core.bench.worker", "--step-ms")
    return {**module_commands(), "worker": (*worker, str(own.step_ms))}, others
