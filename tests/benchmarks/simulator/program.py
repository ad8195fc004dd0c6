"""Reads replay orders from stdin and prints their answers, one JSON line each, until EOF.

A trace is read once for consecutive orders.
"""

import gc
import sys

from engine_core.compiled import use_compiled
from proto.codec import from_json, to_json_line
from proto.errors import TokendError
from tests.benchmarks.simulator.messages import ReplayAnswer, ReplayOrder


def main() -> None:
    """Execute orders until EOF, with the compiled modules of the engine."""
    use_compiled()
    from tests.benchmarks.simulator.player import Player

    gc.disable()  # only whole replays are garbage cycles, and collection takes time
    player = Player()
    for line in sys.stdin.buffer:
        try:
            answer = player.play(from_json(line, ReplayOrder))
        except (TokendError, ValueError) as error:
            answer = ReplayAnswer(error=str(error))
        sys.stdout.buffer.write(to_json_line(answer))
        sys.stdout.buffer.flush()
        gc.collect()


if __name__ == "__main__":
    main()
