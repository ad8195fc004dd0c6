"""How the processes of a daemon are started whose worker computes nothing."""

import sys

from deploy.child import Commands, module_commands


def commands() -> Commands:
    """Everything real but the worker, which answers each step at once with made-up tokens."""
    return {**module_commands(), "worker": (sys.executable, "-P", "-m", "engine_core.bench.worker")}
