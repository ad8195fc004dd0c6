"""An order a line in, its answer a line out.

Both as JSON; the end of the input ends it. A trace that is asked about again is not read again.
"""

import gc
import sys

from engine_core.compiled import use_compiled
from proto.codec import from_json, to_json_line
from proto.errors import TokendError
from tests.benchmarks.simulator.messages import ReplayAnswer, ReplayOrder


def main() -> None:
    """Answer until nothing more is asked, compiled where the engine would be."""
    use_compiled()
    from tests.benchmarks.simulator.player import Player

    gc.disable()  # only a whole replay is a cycle; to look for others takes a fifth of a long one
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
