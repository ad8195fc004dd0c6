"""Where the command `tokend` begins: Ctrl-C ends it quietly, also while its modules are imported.

Imports nothing that takes time.
"""

import os
import signal


def main() -> int:
    """Run the command line and return its exit status; 130 after Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        # An exception within an import would be printed, and there is nothing to clean up yet
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from deploy import cli

    signal.signal(signal.SIGINT, handler)
    return cli.main()
