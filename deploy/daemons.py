"""The running daemons of this user: `tokend ps`, `tokend stop` and `tokend reload`.

A daemon is found by its run directory, in which its supervisor keeps its state as a file.
"""

import contextlib
import json
import os
import select as polling
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from deploy.environment import HostEnvironment
from deploy.flags import parse_words
from deploy.supervisor.processes import process_age
from proto.errors import ConfigError, ProtocolError, TokendError
from proto.messages.lifecycle import DaemonState
from proto.runtime.run_directory import in_use, read_state, run_directories

_QUESTION_SECONDS: Final = 2.0


class RunningDaemon(NamedTuple):
    directory: str
    state: DaemonState

    @property
    def port(self) -> int | None:
        return urlsplit(self.state.url).port

    def __str__(self) -> str:
        return f"{self.state.pid} ({self.state.model} at {self.state.url})"


def running_daemons(parents: Sequence[str]) -> list[RunningDaemon]:
    """Return the daemons with a run directory in one of these folders, the oldest first."""
    found = []
    for parent in parents:
        for directory in run_directories(parent):
            # one that has just begun has no state yet, that of another user cannot be read
            with contextlib.suppress(OSError, ProtocolError):
                found.append(RunningDaemon(directory, read_state(directory)))
    return sorted(found, key=lambda daemon: -process_age(daemon.state.pid))


def matching(word: str, daemons: Sequence[RunningDaemon]) -> list[RunningDaemon]:
    """Return the daemons that a word means: a model's name, a port, a process id or a URL."""
    return [
        daemon
        for daemon in daemons
        if word.rstrip("/")
        in (
            daemon.state.model,
            daemon.state.source,
            daemon.state.url,
            str(daemon.state.pid),
            str(daemon.port),
        )
    ]


def select(word: str | None, daemons: Sequence[RunningDaemon]) -> RunningDaemon:
    """Return the one daemon that a word means, without a word the only one; else ConfigError."""
    if not daemons:
        raise ConfigError("no daemon of this user is running")
    found = list(daemons) if word is None else matching(word, daemons)
    if len(found) == 1:
        return found[0]
    listed = ", ".join(map(str, found or daemons))
    if not found:
        raise ConfigError(f"no daemon of this user is {word}; there are: {listed}")
    raise ConfigError(
        f"several daemons are running; select one by its process id or port: {listed}"
    )


def ps(arguments: Sequence[str], environment: HostEnvironment) -> int:
    """List the running daemons; return the exit status."""
    if arguments:
        raise ConfigError(f"tokend ps takes no arguments, got {arguments[0]}")
    daemons = running_daemons(environment.run_parents())
    if not daemons:
        print("no daemon of this user is running", file=sys.stderr)
        return 0
    rows = [("NAME", "MODEL", "ADDRESS", "PID", "UPTIME", "REQUESTS", "STATE")]
    for daemon in daemons:
        state = daemon.state
        num_requests, doing = _ask(state, environment.settings.get("api_key"))
        uptime = _duration(process_age(state.pid))
        rows.append(
            (state.model, state.source, state.url, str(state.pid), uptime, num_requests, doing)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    needs_key = any(daemon.state.needs_key for daemon in daemons)
    if needs_key and "api_key" not in environment.settings:
        print(
            "-: set TOKEND_API_KEY to see the requests of a daemon with API keys", file=sys.stderr
        )
    return 0


def stop(arguments: Sequence[str], environment: HostEnvironment) -> int:
    """Stop daemons and wait for their end; return the exit status."""
    words = list(arguments)
    daemons = running_daemons(environment.run_parents())
    if words == ["--all"]:
        chosen = daemons
    elif len(words) > 1 or any(word.startswith("-") for word in words):
        raise ConfigError("tokend stop takes one MODEL, PORT or PID, or --all")
    else:
        chosen = [select(words[0] if words else None, daemons)]
    ends = []
    try:
        for daemon in chosen:
            with contextlib.suppress(ProcessLookupError):
                ends.append((daemon, os.pidfd_open(daemon.state.pid)))
                signal.pidfd_send_signal(ends[-1][1], signal.SIGTERM)
                print(f"stopping {daemon}; open requests may finish", flush=True)
        for daemon, descriptor in ends:
            polling.select([descriptor], [], [])
            print(f"stopped {daemon.state.pid}", flush=True)
    except KeyboardInterrupt:
        print("tokend: the daemon goes on draining", file=sys.stderr)
        raise
    finally:
        for _, descriptor in ends:
            os.close(descriptor)
    return 0


_RELOAD_FLAGS: Final = ("--pid", "--port", "--run-directory")
_POLL_SECONDS: Final = 0.05


def reload(words: Sequence[str], environment: HostEnvironment) -> int:
    """Request a reload and wait for its end; return the exit status, 1 if it failed.

    Sends SIGHUP to the supervisor, and waits until the state file shows the end of the reload.
    """
    from deploy.supervisor.reload.reload import write_wanted_model

    models, values = parse_words(words, _RELOAD_FLAGS)
    if len(models) > 1 or len(values) > 1:
        raise ConfigError(
            "tokend reload takes MODEL, and --pid PID, --port PORT or --run-directory DIRECTORY"
        )
    model = _absolute(models[0]) if models else None
    directory = _find_run_directory(values, environment.run_parents())
    before = _wait_for_state(directory, lambda state: state.ending or not state.under_way)
    if before.ending:
        raise TokendError(_ending(before))
    if model is not None:
        write_wanted_model(directory, model)
    os.kill(before.pid, signal.SIGHUP)
    after = _wait_for_state(
        directory,
        lambda state: state.ending or (state.count > before.count and not state.under_way),
    )
    if after.count == before.count:
        raise TokendError(_ending(after))
    if after.error:
        print(f"tokend: the reload failed, {after.error}", file=sys.stderr)
        return 1
    print("reloaded" if model is None else f"reloaded: the model is {after.model} now")
    return 0


def _ending(state: DaemonState) -> str:
    return f"the daemon {state.pid} ({state.model} at {state.url}) is draining and does not reload"


def _absolute(model: str) -> str:
    """Return a model's name, or the absolute path of its file or folder."""
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.exists(path) else model


def _find_run_directory(values: Mapping[str, str], parents: Sequence[str]) -> str:
    """Return that of the daemon which the flags name; without flags, of the only one."""
    directory = values.get("--run-directory")
    if directory is None:
        word = values.get("--pid") or values.get("--port")
        return select(word, running_daemons(parents)).directory
    if not in_use(directory):
        raise ConfigError(f"{directory} is not the run directory of a running daemon")
    return directory


def _wait_for_state(directory: str, is_reached: Callable[[DaemonState], bool]) -> DaemonState:
    """Poll until a state is reached, and return it; raises TokendError if the daemon ends."""
    while True:
        try:
            state = read_state(directory)
        except (OSError, ProtocolError):
            raise TokendError(f"the daemon in {directory} has ended") from None
        if is_reached(state):
            return state
        if not in_use(directory):
            raise TokendError(f"the daemon in {directory} ended meanwhile")
        time.sleep(_POLL_SECONDS)


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")


def _ask(state: DaemonState, api_key: str | None) -> tuple[str, str]:
    """Return how many requests a daemon has in flight, "-" if it does not say, and its state.

    A daemon that needs a key is not asked for the first without one: its log would have a refusal.
    """
    url = state.url
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # the certificate has the name of the server, not the address of this machine
    with httpx.Client(base_url=url, headers=headers, timeout=_QUESTION_SECONDS, verify=False) as it:
        try:
            ready = it.get("/health/ready").json()
            doing = "ready" if ready["ready"] else ", ".join(ready["reasons"])
            for engine, reasons in ready.get("missing_engines", {}).items():
                doing += f"; engine {engine}: {', '.join(reasons) or 'missing'}"
            if "standby" in ready:
                numbers = ", ".join(f"{n} {role}" for role, n in ready["standby"].items() if n)
                doing += f"; on standby: {numbers or 'none yet'}"
            if state.needs_key and api_key is None:
                return "-", doing
            load = it.get("/load")
            return str(load.json()["server_load"]) if load.is_success else "-", doing
        except (httpx.HTTPError, json.JSONDecodeError, AttributeError, KeyError, TypeError):
            return "-", "starting, or busy"


def _duration(seconds: float) -> str:
    """Return a time as text: "12 s", "5 min", "3 h 20 min", "2 d 4 h"."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"
