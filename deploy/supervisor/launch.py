"""What a daemon consists of, before anything of it runs."""

import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from deploy.supervisor.processes import Commands
from proto.config import ServeConfig
from proto.errors import ConfigError
from proto.faults import Fault
from proto.lifecycle import Role
from proto.prepared_model import PreparedModel

# The listening socket: bound by the supervisor before anything loads, inherited by front ends.


_BACKLOG: Final = 2048
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on host and port; port 0 takes a free one.

    Raises ConfigError when the address is taken or is none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}", "host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port} is in use on {host}: choose another, or 0 for a free one", "port"
            ) from None
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """An URL at which this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = _ANY.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    listeners: listening sockets, inherited by every front end.
    variables: environment that the processes get, each role with its own additions.
    commands: how the process of each role is started.
    prepare: prints the manifest of the model as it is now, for a reload.
    faults: that tests have asked for.
    """

    config: ServeConfig
    model: PreparedModel
    listeners: tuple[socket.socket, ...]
    variables: Mapping[str, str]
    commands: Commands
    prepare: Sequence[str]
    faults: tuple[Fault, ...] = ()

    def processes(self) -> list[tuple[Role, int]]:
        """Every process, as (role, index)."""
        found: list[tuple[Role, int]] = [
            ("worker", rank) for rank in range(self.config.parallel.tensor_parallel_size)
        ]
        found.append(("engine_core", 0))
        found.extend(("api_server", index) for index in range(self.front_ends))
        return found

    @property
    def front_ends(self) -> int:
        return self.config.frontend.api_server_count
