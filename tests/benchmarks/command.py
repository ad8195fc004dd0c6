"""Run a benchmark as a command, with the exit statuses of `tokend`."""

import sys
from collections.abc import Callable, Sequence

from deploy.cli import ended_by_signals
from proto.errors import ConfigError, ModelError, TokendError


def run(main: Callable[[Sequence[str]], object], words: Sequence[str] | None = None) -> int:
    """Call main with arguments, by default those of the command line.

    Return main's status, 0 for None; 2 for invalid flags, 1 for other failures.
    """
    try:
        with ended_by_signals():
            status = main(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
    except (ConfigError, ModelError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    except TokendError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status if isinstance(status, int) else 0


def from_zero_number(text: str) -> float:
    """Parse a number of at least 0; for `type=` of a flag."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number
