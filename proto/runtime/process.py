"""Start and exit of engine, workers and front ends. Start reading at `run`.

A child process reads its first boot message from the inherited descriptor, sets its title, ignores
SIGINT, prints the stacks of all threads on SIGUSR1, exits when the supervisor is gone, and reports
the error that ends it.

    boot message ─▶ prepare: imports, weights ─ Prepared ─▶ supervisor ─ TakePlace ─▶ main

A process with a place finds TakePlace when it has prepared itself. A standby process waits for it,
and prepares itself at low priority.
"""

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import zmq

from proto import PROTOCOL_VERSION
from proto.codec import MessageDecoder
from proto.errors import ErrorInfo, ProtocolError
from proto.messages.lifecycle import (
    Alive,
    Fatal,
    FromSupervisor,
    Ping,
    Prepared,
    ProcessBoot,
    Shutdown,
    TakePlace,
)
from proto.runtime.log_lines import formatter, guard_output
from proto.runtime.run_directory import RunDirectory
from proto.runtime.sockets import Link, Poller, supervisor_path

logger = logging.getLogger("tokend.process")

_FATAL_SECONDS = 1.0
_ORPHAN_WAIT_SECONDS = 1.0
_LOWEST_PRIORITY: Final = 19

Main = Callable[[ProcessBoot, Link], None]
"""Runs a process in its place until it is asked to stop: (boot, link to the supervisor)."""
Prepare = Callable[[ProcessBoot, Link], Main]
"""Does what a process needs no place for, and returns what runs it in its place."""


def run(prepare: Prepare) -> None:
    """Prepare a child of the supervisor, run it in its place, and exit with its status."""
    boot = _read_boot()
    directory = RunDirectory.join(boot.run_dir)
    _set_up_process(boot, directory)
    context = zmq.Context()
    supervisor = Link.connect(
        supervisor_path(
            boot.run_dir, boot.role, boot.index, boot.incarnation, has_place=boot.has_place
        ),
        FromSupervisor,
        context,
    )
    status = 0
    try:
        main = (prepare if boot.has_place else _at_low_priority(prepare))(boot, supervisor)
        supervisor.send(Prepared())
        if (placed := _await_place(supervisor)) is not None:
            boot = placed
            _set_name(boot)
            main(boot, supervisor)
    except Exception as error:  # report any error to the supervisor
        status = 1
        supervisor.send(Fatal(boot.role, boot.index, describe(error, boot.index)))
    supervisor.close(_FATAL_SECONDS)
    context.term()  # wait until the message is sent; close() alone does not
    _exit(status, directory)


def _at_low_priority(prepare: Prepare) -> Prepare:
    """Return `prepare` in a thread of low priority, after which little garbage is collected.

    Of a process that has lowered its own priority only root could raise it again.
    """

    def run_in_thread(boot: ProcessBoot, supervisor: Link) -> Main:
        with ThreadPoolExecutor(1, initializer=_lower_priority) as threads:
            main = threads.submit(prepare, boot, supervisor).result()
            threads.submit(freeze_heap).result()
            return main

    return run_in_thread


def _lower_priority() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _await_place(supervisor: Link) -> ProcessBoot | None:
    """Wait for a place, and answer pings meanwhile; return None for `Shutdown`."""
    poller = Poller([supervisor])
    while True:
        poller.wait()
        for message in supervisor.receive(1):  # those that follow are for `main`
            if isinstance(message, TakePlace):
                return message.boot
            if isinstance(message, Shutdown):
                return None
            if isinstance(message, Ping):
                supervisor.send(Alive())


def set_title(title: str) -> None:
    """Set the title that `ps` shows for this process."""
    try:
        import setproctitle
    except ImportError:
        logger.debug("setproctitle is missing: processes keep their Python names")
    else:
        setproctitle.setproctitle(title)


def describe(error: BaseException, rank: int | None = None) -> ErrorInfo:
    """Return an exception with its traceback as an ErrorInfo."""
    return ErrorInfo(
        kind="internal",
        message=f"{type(error).__name__}: {error}",
        rank=rank,
        traceback="".join(traceback.format_exception(error)),
    )


GCThresholds = tuple[int, int, int]
"""Objects in the youngest generation, then collections of one before one of the next."""
STEP_LOOP_GC: Final = (50_000, 20, 100)
"""More objects than a step leaves alive; reference cycles left by errors are still collected."""
REQUEST_LOOP_GC: Final = (3_000, 5, 5)
"""For a process whose requests leave reference cycles and a few objects per token: old generations
are collected about as often as with Python's thresholds, the youngest less often."""


def freeze_heap(thresholds: GCThresholds = STEP_LOOP_GC) -> None:
    """Exempt the objects that are alive now from garbage collection; call it before serving.

    With Python's own thresholds a step of 1,024 requests starts six collections, and every
    twentieth step waits 15 to 30 ms for one of the whole heap. Most of the heap is permanent
    (modules, weights, block tables of the pool), and what a step allocates is freed by reference
    counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)


def _read_boot() -> ProcessBoot:
    parser = argparse.ArgumentParser(description="started by tokend serve, not by hand")
    parser.add_argument("--boot-fd", type=int, required=True)
    descriptor = parser.parse_known_args()[0].boot_fd  # other words are for `main`
    with os.fdopen(descriptor, "rb") as stream:
        stream.seek(0)
        boot: ProcessBoot = MessageDecoder[ProcessBoot](ProcessBoot).decode(stream.read())
    if boot.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"supervisor speaks protocol {boot.protocol_version}, this process {PROTOCOL_VERSION}"
        )
    return boot


def _set_up_process(boot: ProcessBoot, directory: RunDirectory) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_name(boot)
    faulthandler.register(signal.SIGUSR1)  # works even if no Python code can run
    threading.Thread(
        target=_exit_with_supervisor, args=(boot.death_fd, directory), daemon=True
    ).start()


def _set_name(boot: ProcessBoot) -> None:
    """Put the name of the process into its title and the lines that it writes."""
    config = boot.config.frontend
    guard_output(boot.name, config.log_format)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(config.log_format, boot.name))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    set_title(f"tokend: {boot.name}")


def _exit_with_supervisor(death_fd: int, directory: RunDirectory) -> None:
    # SIGUSR1 must interrupt another thread: its stack shows what the process does.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    while os.read(death_fd, 1):
        pass  # the pipe carries no data; end of file means that the supervisor has ended
    _exit(1, directory, _ORPHAN_WAIT_SECONDS)


def _exit(status: int, directory: RunDirectory, wait_seconds: float = 0.0) -> None:
    """Exit without waiting for threads or atexit hooks, which may hang."""
    directory.leave(wait_seconds)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
