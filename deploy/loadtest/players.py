"""Programs that play the workloads of a scheduler: ours, and a peer's beside it."""

import sys
from pathlib import Path

PEER_PROGRAM = Path(__file__).parent / "peers" / "vllm_scheduler.py"


def our_command() -> list[str]:
    """The scheduler that the daemon wires."""
    return [sys.executable, "-P", "-m", "engine_core.bench"]


def peer_command(python: str) -> list[str]:
    """vLLM's own scheduler, in the environment of this interpreter."""
    return [python, str(PEER_PROGRAM)]
