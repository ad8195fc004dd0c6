"""What a daemon consists of, before anything of it runs."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.child import Commands
from proto.config import ServeConfig
from proto.faults import Fault
from proto.lifecycle import Role
from proto.prepared_model import PreparedModel


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
