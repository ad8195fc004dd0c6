"""A fake process of the daemon that only starts, reports and ends: `fake_process.py BEHAVIOUR`.

good             reports ready, logs the messages it receives, ends on Shutdown
stubborn         reports ready, ignores Shutdown and SIGTERM
bad_model        fails because of its model while starting
bad_model_later  the same, but only from its second incarnation on
bad_model_of_1   the same, but only those of the second process
bad_model_once   the same, but only in its second incarnation
bad_standby      good; fails as a standby process, before it has a place
slow_standby     good; as a standby process it is never prepared
exits            ends without an error message, status 3, while starting
mute             never reports ready
busy             good; its first incarnation has two requests in flight until SIGUSR2
asked_to_drain   good; SIGUSR2 stands for an operator who requests a drain
orphans          good; leaves an orphaned process and logs its id

In all other behaviours SIGUSR2 raises an error. After SIGHUP an engine reports that its first
worker owes a step; on SIGIO it reports that front end 0 is stalled, on SIGALRM that its worker sent
an invalid message.
"""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from proto import PROTOCOL_VERSION
from proto.codec import Message
from proto.errors import ModelError
from proto.messages.lifecycle import (
    AbortRequests,
    Alive,
    Drain,
    DrainProgress,
    DrainRequested,
    DropEngine,
    EngineAlive,
    EngineReady,
    ForgetImages,
    FrontEndReady,
    FrontEndStalled,
    NewEngine,
    NewWorkers,
    NextEngine,
    NextReady,
    Notice,
    OldEngineIdle,
    Ping,
    ProcessBoot,
    Progress,
    ProtocolViolation,
    Shutdown,
    Switched,
    SwitchEngine,
    WorkersReady,
)
from proto.runtime import process
from proto.runtime.sockets import Link, Poller

POLL_SECONDS: Final = 0.02
"""A signal just before the poll does not end it: Python's handler runs when the poll has ended."""


def prepare(boot: ProcessBoot, supervisor: Link, behaviour: str) -> process.Main:
    if not boot.has_place and behaviour == "bad_standby":
        raise RuntimeError("no standby today")
    if not boot.has_place and behaviour == "slow_standby":
        threading.Event().wait()
    return partial(main, behaviour=behaviour)


def main(boot: ProcessBoot, supervisor: Link, behaviour: str) -> None:
    if behaviour == "exits":
        os._exit(3)
    bad_incarnations = {
        "bad_model": range(99),
        "bad_model_later": range(1, 99),
        "bad_model_once": [1],
        "bad_model_of_1": range(1, 99) if boot.index == 1 else (),
    }
    if boot.incarnation in bad_incarnations.get(behaviour, ()):
        raise ModelError("config.json asks for rope type 'moebius'")
    signal.signal(signal.SIGUSR2, _raise_error)
    owed_steps: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, frame: owed_steps.append(number))
    signal.signal(signal.SIGIO, lambda *_: supervisor.send(FrontEndStalled(0, 0)))
    violation = ProtocolViolation("worker", boot.engine, boot.worker_epoch, "it sends garbage")
    signal.signal(signal.SIGALRM, lambda *_: supervisor.send(violation))
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "orphans":
        pid = subprocess.check_output(["sh", "-c", "sleep 60 >&- & echo $!"], text=True)
        supervisor.send(Notice(f"orphan {pid}"))
    supervisor.send(Progress("loading weights", 0.5))
    if boot.incarnation:
        incarnation = f"incarnation {boot.incarnation}, epochs {boot.epoch} and {boot.worker_epoch}"
        supervisor.send(Notice(f"{incarnation}, front ends {boot.front_ends}"))
        if boot.role == "api_server":
            supervisor.send(Notice(f"engines {boot.engine_epochs}"))
    front_end = FrontEnd(boot, supervisor, behaviour)
    if behaviour != "mute":
        _report_ready(boot, supervisor)
    poller, worker_epoch = Poller([supervisor]), boot.worker_epoch
    while True:
        poller.wait(POLL_SECONDS)
        for message in supervisor.receive():
            if isinstance(message, Shutdown):
                if behaviour != "stubborn":
                    return
                continue
            if isinstance(message, Ping):
                for answer in _answers(boot, worker_epoch, bool(owed_steps)):
                    supervisor.send(answer)
                continue
            received = message if not isinstance(message, NextEngine) else "NextEngine"
            supervisor.send(Notice(f"received {received}"))
            if isinstance(message, NewWorkers):
                worker_epoch = message.worker_epoch
                supervisor.send(WorkersReady(worker_epoch))
            if boot.role == "api_server":
                front_end.handle(message)
        front_end.report_next_engine()


class FrontEnd:
    """The replies of a front end; `busy` ones have two requests at engine 0 of the start."""

    def __init__(self, boot: ProcessBoot, supervisor: Link, behaviour: str) -> None:
        self.boot = boot
        self.supervisor = supervisor
        self.wants_drain = behaviour == "asked_to_drain"
        self.wants_aborts = behaviour == "asked_to_abort"
        self.num_requests = 2 if behaviour == "busy" and not boot.incarnation else 0
        self.epochs = list(boot.engine_epochs)
        self.next_engines: list[NextEngine] = []
        self.when_idle: list[Message] = []
        if behaviour in ("busy", "asked_to_drain", "asked_to_abort"):
            signal.signal(signal.SIGUSR2, self.finish)

    def finish(self, number: int, frame: FrameType | None) -> None:
        """Finish the requests, or send the operator's request, on SIGUSR2."""
        index, self.num_requests = self.boot.index, 0
        message: Message = DrainRequested(index) if self.wants_drain else DrainProgress(index, 0)
        if self.wants_aborts:
            message = AbortRequests(["cmpl-1"], "alice")
            self.supervisor.send(ForgetImages())
        for each in [message, *self.when_idle]:
            self.supervisor.send(each)

    def report_next_engine(self) -> None:
        """Report whether the next engine is ready."""
        for each in list(self.next_engines):
            if each.in_place or os.path.exists(ready_file(self.boot.run_dir, each.epoch)):
                self.next_engines.remove(each)
                self.supervisor.send(NextReady(self.boot.index, each.epoch))

    def handle(self, message: Message) -> None:
        index = self.boot.index
        if isinstance(message, Drain):
            self.supervisor.send(DrainProgress(index, self.num_requests))
        elif isinstance(message, NextEngine):
            self.next_engines = [message]
        elif isinstance(message, DropEngine):
            self.next_engines = []
        elif isinstance(message, SwitchEngine) and message.epoch not in self.epochs:
            old = self.epochs.copy()
            self.epochs[message.engine] = message.epoch
            self.epochs = list(message.epochs) or self.epochs
            self.supervisor.send(Switched(index, message.epoch))
            for epoch in set(old) - set(self.epochs):
                idle = OldEngineIdle(index, epoch)
                if self.num_requests and epoch == self.boot.epoch:
                    self.when_idle = [idle]
                else:
                    self.supervisor.send(idle)
        elif isinstance(message, NewEngine):
            self.epochs[message.engine] = message.epoch


def ready_file(run_dir: str, epoch: int) -> str:
    """Return the path of a file that exists once the engine of an epoch is ready."""
    return os.path.join(run_dir, f"ready{epoch}")


def _answers(boot: ProcessBoot, worker_epoch: int, owed_steps: bool) -> list[Message]:
    """Return the replies to a Ping; an engine repeats WorkersReady, even before workers exist."""
    if boot.role != "engine_core":
        return [Alive()]
    awaits = (0,) if owed_steps and worker_epoch == 1 + boot.engine else ()
    alive = EngineAlive(worker_epoch, 100, awaits, ready=True, has_work=bool(awaits))
    return [alive, WorkersReady(worker_epoch)]


def _raise_error(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("an error on purpose")


def _report_ready(boot: ProcessBoot, supervisor: Link) -> None:
    if boot.role == "engine_core":
        supervisor.send(Notice("the pool is small"))
        Path(ready_file(boot.run_dir, boot.epoch)).touch()
        supervisor.send(
            EngineReady(PROTOCOL_VERSION, boot.epoch, 128, 64, 16, 256, "fake", engine=boot.engine)
        )
        supervisor.send(WorkersReady(boot.worker_epoch))
    if boot.role == "api_server":
        supervisor.send(FrontEndReady(boot.index))


if __name__ == "__main__":
    chosen = sys.argv.pop(1)
    process.run(partial(prepare, behaviour=chosen))
