"""The start of a daemon: its listening socket, its processes, and the message when it is ready.

`Launch` lists the processes to start, `Readiness` collects their reports.
"""

import contextlib
import errno
import json
import os
import shlex
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from proto.codec import Message
from proto.errors import ConfigError
from proto.messages.lifecycle import (
    DaemonState,
    EngineReady,
    FrontEndReady,
    PhaseClock,
    ProcessStart,
    Role,
    StartPhase,
    WeightFormatMemory,
    describe_weights,
    process_name,
)
from proto.messages.prepared_model import PreparedModel
from proto.runtime.faults import Fault
from proto.runtime.log_lines import notice_line
from proto.settings.config import CacheConfig, FrontEndConfig, ServeConfig, memory_size
from proto.settings.generation_config import NO_DEFAULTS, GenerationDefaults
from proto.settings.pooler_config import pooler_of

Commands = Mapping[Role, Sequence[str]]
"""Command line of each role, without the boot descriptor."""

# ---- The listening socket ----

_BACKLOG: Final = 2048
_ADMIN_HOST: Final = "127.0.0.1"
_LOOPBACK_OF: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def listen(host: str, port: int, flag: str = "port") -> socket.socket:
    """Return a socket that listens on host and port; port 0 takes a free one. flag: of the port.

    The supervisor binds it before the model loads, and the front ends inherit it. Raises
    ConfigError if the address is in use or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--{flag} {port} is in use on {host}: choose another, or 0 for a free one",
                flag.replace("-", "_"),
            ) from None
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


_SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux."""


@contextlib.contextmanager
def admin_listeners(config: FrontEndConfig) -> Iterator[tuple[socket.socket, ...]]:
    """Listen for operators as `config` says; at the end close, and remove the Unix socket.

    Raises ConfigError if a port or a path cannot be used.
    """
    with contextlib.ExitStack() as stack:
        found = []
        if config.admin_port is not None:
            found.append(stack.enter_context(listen(_ADMIN_HOST, config.admin_port, "admin-port")))
        if config.admin_socket is not None:
            found.append(stack.enter_context(_unix_listener(config.admin_socket)))
        yield tuple(found)


@contextlib.contextmanager
def _unix_listener(path: str) -> Iterator[socket.socket]:
    """Listen on a Unix socket of mode 0600, in place of one that no process listens on any more."""

    def refused(why: str | None) -> ConfigError:
        return ConfigError(f"--admin-socket {path}: {why}")

    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise refused(f"the path is longer than {_SOCKET_PATH_BYTES} bytes")
    binds, own = False, None
    with socket.socket(socket.AF_UNIX) as listener:
        try:  # a signal may end the daemon at any of these lines
            try:
                if os.path.lexists(path):
                    if not stat.S_ISSOCK(os.lstat(path).st_mode):
                        raise refused("exists, and is no socket")
                    if _is_listened_on(path):
                        raise refused("is in use by another process")
                    os.unlink(path)
                binds = True
                listener.bind(path)
                own = os.lstat(path)
                os.chmod(path, 0o600)
                listener.listen(_BACKLOG)  # not before the mode is right
            except OSError as error:
                raise refused(error.strerror) from None
            listener.setblocking(False)
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if _is(path, own) if own is not None else binds and not _is_listened_on(path):
                    os.unlink(path)


def _is(path: str, known: os.stat_result) -> bool:
    return os.path.samestat(os.lstat(path), known)


def _is_listened_on(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # its backlog may be full
        return probe.connect_ex(path) != errno.ECONNREFUSED


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return a URL at which this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = _LOOPBACK_OF.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# ---- The processes ----


@dataclass(frozen=True)
class Launch:
    """Everything that the supervisor needs to start a daemon.

    listeners, admin_listeners: listening sockets for all clients and for operators, inherited by
        every front end. url: address of the first one.
    variables: environment variables of the processes; each role gets additions.
    commands: command line of each role.
    prepare_command: followed by a model, prints its manifest as it is now, for a reload.
    clock: phases of the start before the processes were started.
    faults: faults to inject, for tests.
    draft_model: that of --speculative-config; None without one.
    generation_defaults: of the sampling, for the message when the daemon is ready.
    """

    config: ServeConfig
    model: PreparedModel
    listeners: tuple[socket.socket, ...]
    url: str
    variables: Mapping[str, str]
    commands: Commands
    prepare_command: Sequence[str]
    clock: PhaseClock
    faults: tuple[Fault, ...] = ()
    draft_model: PreparedModel | None = None
    generation_defaults: GenerationDefaults = NO_DEFAULTS
    admin_listeners: tuple[socket.socket, ...] = ()

    def processes(self) -> list[tuple[Role, int]]:
        found: list[tuple[Role, int]] = [
            ("worker", index) for index in range(self.config.parallel.num_workers)
        ]
        found.extend(("engine_core", index) for index in range(self.num_engines))
        found.extend(("api_server", index) for index in range(self.num_front_ends))
        return found

    @property
    def num_engines(self) -> int:
        return self.config.parallel.data_parallel_size

    @property
    def num_front_ends(self) -> int:
        return self.config.frontend.api_server_count

    @property
    def model_name(self) -> str:
        return self.config.model.served_names(self.model.name)[0]

    def state(self, pid: int) -> DaemonState:
        """Return the state for other commands. pid: of the supervisor."""
        paths = tuple(each.source for each in (self.model, self.draft_model) if each is not None)
        return DaemonState(
            pid,
            self.url,
            self.model_name,
            self.config.model.model,
            paths,
            needs_key=self.config.frontend.has_client_keys,
            num_engines=self.num_engines,
        )


def check_length(config: ServeConfig, model: PreparedModel) -> None:
    """Raise ConfigError if --max-model-len is more than the model has positions."""
    length = config.model.max_model_len
    if length is not None and length > model.max_position:
        raise ConfigError(
            f"--max-model-len {length} is more than the {model.max_position} positions "
            f"that {model.name} supports"
        )


# ---- Readiness ----


class Readiness:
    """Collects the reports that make the daemon ready: of every engine and every front end."""

    def __init__(self, num_engines: int, num_front_ends: int) -> None:
        self._engines: dict[int, EngineReady] = {}
        self._num_engines = num_engines
        self._missing_front_ends = set(range(num_front_ends))
        self._front_end_starts: dict[int, ProcessStart] = {}

    def note_ready(self, message: EngineReady | FrontEndReady) -> None:
        """Note a report during the start."""
        if isinstance(message, EngineReady):
            self._engines[message.engine] = message
        else:
            self._missing_front_ends.discard(message.index)
            start = ProcessStart("api_server", message.index, message.phases)
            self._front_end_starts[message.index] = start

    def note_new_engine(self, message: Message) -> None:
        """Keep the report of an engine that has replaced another; ignore other messages."""
        if isinstance(message, EngineReady):
            self._engines[message.engine] = message

    @property
    def engine(self) -> EngineReady:
        """The last report of engine 0, to which the others are alike; it must have been ready."""
        return self._engines[0]

    @property
    def starts(self) -> tuple[ProcessStart, ...]:
        of_engines = (self._engines[index].starts for index in sorted(self._engines))
        return (*chain.from_iterable(of_engines), *self._front_end_starts.values())

    @property
    def complete(self) -> bool:
        """Whether the daemon has been ready."""
        return len(self._engines) == self._num_engines and not self._missing_front_ends


def ready_message(launch: Launch, readiness: Readiness) -> str:
    """Return what the operator sees when the daemon is ready: a line, or several as text.

    Engines have the same model and flags, so that what it says of engine 0 holds for each.

    --log-level debug adds the duration of each phase of the start.
    """
    config = launch.config.frontend
    first = (
        f"tokend is ready: {launch.model_name} at {launch.url} after {launch.clock.seconds:.1f} s"
    )
    timings = _timings(launch, readiness) if config.log_level == "debug" else ""
    admin = launch.admin_listeners
    ports = [each.getsockname()[1] for each in admin if each.family != socket.AF_UNIX]
    describe = _ready_records if config.log_format == "json" else _ready_text
    return "\n".join(describe(first, launch, readiness.engine, timings, ports))


def _ready_records(
    first: str, launch: Launch, engine: EngineReady, timings: str, admin_ports: Sequence[int]
) -> list[str]:
    """Return the message as JSON lines."""
    config = launch.config.frontend
    fields: dict[str, Any] = {
        "model": launch.model_name,
        "engines": launch.num_engines,
        "url": launch.url,
        "max_model_len": engine.max_model_len,
        "kv_cache_bytes": engine.kv_cache_bytes,
        "kv_cache_tokens": engine.kv_cache_tokens,
        "kv_cache_grows": engine.kv_cache_grows,
        "weights": describe_weights(engine.weights),
        "device": engine.device_name,
        "kernels": engine.kernels,
        "drafts": engine.drafts,
        "sampling": str(launch.generation_defaults),
        "standby": launch.config.reliability.standby,
    }
    if shared := _shared_weights(engine, launch.num_engines):
        fields["shared_weights"] = describe_weights(shared)
    if admin_ports:
        fields["admin_port"] = admin_ports[0]
    if config.admin_socket is not None:
        fields["admin_socket"] = config.admin_socket
    lines = [notice_line(first, "tokend", **fields)]
    if timings:
        lines.append(notice_line(f"started in {timings}", "tokend", level="DEBUG"))
    return lines


def _ready_text(
    first: str, launch: Launch, engine: EngineReady, timings: str, admin_ports: Sequence[int]
) -> list[str]:
    """Return the message as lines of text."""
    config = launch.config.frontend
    request: dict[str, Any] = {"model": launch.model_name}
    path = "/v1/completions"
    pooler = pooler_of(launch.config.model, launch.model)
    if pooler is None:
        request |= {"prompt": "The sea is", "max_tokens": 48, "stream": True}
    else:
        path = "/v1/embeddings" if pooler.task == "embed" else "/classify"
        request |= {"input": "The sea is"}
    together = ", prompt and output together" if pooler is None else " a text"
    standby = launch.config.reliability.standby
    key = ' -H "Authorization: Bearer $TOKEND_API_KEY"' if config.has_client_keys else ""
    entries = [
        ("runs on", engine.device_name),
        ("engines", f"{launch.num_engines}; of each:" if launch.num_engines > 1 else ""),
        ("kernels", engine.kernels),
        ("length", f"up to {engine.max_model_len:,} tokens{together}"),
        ("weights", _weights(engine, launch.num_engines)),
        ("KV cache", _kv_cache(engine, launch.config.cache)),
        ("drafts", engine.drafts),
        ("standby", f"{standby}, started beside the first requests" if standby else ""),
        ("sampling", str(launch.generation_defaults) if pooler is None else ""),
        ("web pages", f"{launch.url}/, of the API {launch.url}/docs" if config.page else ""),
        (
            "operators",
            ", ".join(
                [f"http://{_ADMIN_HOST}:{port}" for port in admin_ports]
                + [f"socket {path}" for path in [config.admin_socket] if path is not None]
            ),
        ),
        ("start", timings),
        (
            "try it",
            f"curl {'-N ' if pooler is None else ''}{launch.url}{path} "
            f"-H 'Content-Type: application/json'{key} "
            f"-d {shlex.quote(json.dumps(request))}",
        ),
    ]
    lines = [f"  {title:10}{text}" for title, text in entries if text]
    return [first, *lines, "  Ctrl-C stops"]


def _weights(engine: EngineReady, num_engines: int) -> str:
    """Return the memory of weights by format, and which of it engines have together."""
    shared = _shared_weights(engine, num_engines)
    own = [part for part in engine.weights if part not in shared]
    if not shared:
        return f"{describe_weights(own)}, in memory"
    rest = f", and {describe_weights(own)} of each" if own else ""
    return f"{describe_weights(shared)}, in memory that the engines share{rest}"


def _shared_weights(engine: EngineReady, num_engines: int) -> list[WeightFormatMemory]:
    return [part for part in engine.weights if part.is_shared and num_engines > 1]


def _kv_cache(engine: EngineReady, cache: CacheConfig) -> str:
    """Return how much memory the KV cache has now and later; "" for a model without one."""
    if not engine.kv_cache_bytes:
        return ""
    size = memory_size(engine.kv_cache_bytes)
    tokens = f"{engine.kv_cache_tokens:,} tokens"
    if engine.kv_cache_grows:
        is_counted = cache.num_gpu_blocks_override is not None
        flag = "--num-gpu-blocks-override" if is_counted else "--kv-cache-memory"
        return f"grows as it is used, up to {size} for {tokens}; {flag} sets the limit"
    return f"{size} for {tokens}, in memory"


def _timings(launch: Launch, readiness: Readiness) -> str:
    """Return the duration of the start and of its phases, by process."""
    processes = (
        f"{process_name(start.role, start.index)}: {_phases(start.phases)}"
        for start in readiness.starts
    )
    own = f"{launch.clock.seconds:.2f} s: {_phases(launch.clock.phases)}"
    return "; ".join([own, *processes])


def _phases(phases: Sequence[StartPhase]) -> str:
    return ", ".join(f"{phase.what} {phase.seconds:.2f} s" for phase in phases)
