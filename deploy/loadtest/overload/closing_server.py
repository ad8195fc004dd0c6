"""A server that reads what comes on a connection and closes it: the control of an overload run.

What clients who come and leave take from the others beside it, they and the kernel take by
themselves. `python -m` this module prints its port and serves until it is ended.
"""

import socket
import subprocess
import sys
from typing import Final

from deploy.loadtest.program import Program
from proto.errors import TokendError

_BACKLOG: Final = 512
_READ_BYTES: Final = 64 << 10


class ClosingServer(Program):
    """One of these in a process of its own; `url` is where it listens."""

    def __init__(self) -> None:
        process = subprocess.Popen((sys.executable, "-P", "-m", __name__), stdout=subprocess.PIPE)
        super().__init__(process)
        assert process.stdout is not None
        port = process.stdout.readline().strip().decode()
        if not port:
            raise TokendError("the control server did not start")
        self.url = f"http://127.0.0.1:{port}"


def serve(listener: socket.socket) -> None:
    """One connection after the other, for ever."""
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.recv(_READ_BYTES)
            except ConnectionError:
                continue  # it was reset: gone all the same


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listening:
        print(listening.getsockname()[1], flush=True)
        serve(listening)
