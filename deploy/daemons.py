"""The running daemons of this user: `tokend ps` and `tokend stop`.

A daemon is found by its run directory, in which its supervisor keeps its state as a file.
"""

import contextlib
import json
import os
import select as polling
import signal
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from deploy.environment import HostEnvironment
from deploy.supervisor.processes import process_age
from proto.errors import ConfigError, ProtocolError
from proto.lifecycle import DaemonState
from proto.run_directory import read_state, run_directories

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
    raise ConfigError(f"several daemons are running; select one by its process id: {listed}")


def ps(environment: HostEnvironment) -> int:
    """List the running daemons; return the exit status."""
    daemons = running_daemons(environment.run_parents())
    if not daemons:
        print("no daemon of this user is running", file=sys.stderr)
        return 0
    rows = [("NAME", "MODEL", "ADDRESS", "PID", "UPTIME", "REQUESTS", "STATE")]
    for daemon in daemons:
        state = daemon.state
        num_requests, doing = _ask(state.url, environment.settings.get("api_key"))
        uptime = _duration(process_age(state.pid))
        rows.append(
            (state.model, state.source, state.url, str(state.pid), uptime, num_requests, doing)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
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


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")


def _ask(url: str, api_key: str | None) -> tuple[str, str]:
    """Return how many requests a daemon has in flight, "-" if it does not say, and its state."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # the certificate has the name of the server, not the address of this machine
    with httpx.Client(base_url=url, headers=headers, timeout=_QUESTION_SECONDS, verify=False) as it:
        try:
            ready = it.get("/health/ready").json()
            doing = "ready" if ready["ready"] else ", ".join(ready["reasons"])
            load = it.get("/load")
            return str(load.json()["server_load"]) if load.is_success else "-", doing
        except (httpx.HTTPError, json.JSONDecodeError, KeyError, TypeError):
            return "-", "starting, or busy"


def _duration(seconds: float) -> str:
    """Return a time as text: "12 s", "5 min", "3 h 20 min", "2 d 4 h"."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"
