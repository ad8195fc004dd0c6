"""A process of the daemon that does nothing but live and die: `fake_process.py BEHAVIOUR`.

good             reports ready, tells the operator what it hears, ends on Shutdown
stubborn         reports ready, ignores Shutdown and SIGTERM
bad_model        fails over its model while starting
bad_model_later  in its second life, whatever the first one ends of
bad_model_once   in its second life only
exits            ends without a word, status 3, while starting
mute             never reports ready
busy             is good, and in its first life has two requests under way until SIGUSR2
asked_to_drain   is good, and an operator asks it at SIGUSR2 that the daemon drains
orphans          leaves a process without its parent behind, names it, and is good

Whoever else is sent SIGUSR2 fails with an error. Of an engine that is sent SIGHUP the first worker
owes an answer from then on; one that is sent SIGIO gives up front end 0, and sent SIGALRM it says
that worker 0 babbles.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Final

from proto import PROTOCOL_VERSION, process
from proto.codec import Message
from proto.errors import ModelError
from proto.lifecycle import (
    AbortRequests,
    Alive,
    Drain,
    DrainProgress,
    DrainRequested,
    DropEngine,
    EngineAlive,
    EngineReady,
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
from proto.sockets import Link, Poller

LOOK_SECONDS: Final = 0.02


def main(boot: ProcessBoot, supervisor: Link, behaviour: str) -> None:
    if behaviour == "exits":
        os._exit(3)
    bad_lives = {"bad_model": range(99), "bad_model_later": range(1, 99), "bad_model_once": [1]}
    if boot.incarnation in bad_lives.get(behaviour, ()):
        raise ModelError("config.json asks for rope type 'moebius'")
    signal.signal(signal.SIGUSR2, _crack)
    waits: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, frame: waits.append(number))
    signal.signal(signal.SIGIO, lambda *_: supervisor.send(FrontEndStalled(0, 0)))
    babbles = ProtocolViolation("worker", 0, boot.worker_epoch, "it babbles")
    signal.signal(signal.SIGALRM, lambda *_: supervisor.send(babbles))
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "orphans":
        pid = subprocess.check_output(["sh", "-c", "sleep 60 >&- & echo $!"], text=True)
        supervisor.send(Notice(boot.role, boot.index, f"orphan {pid}"))
    supervisor.send(Progress(boot.role, boot.index, "loading weights", 0.5))
    if boot.incarnation:
        lives = f"life {boot.incarnation}, epochs {boot.epoch} and {boot.worker_epoch}"
        supervisor.send(Notice(boot.role, boot.index, f"{lives}, front ends {boot.front_ends}"))
    front_end = FrontEnd(boot, supervisor, behaviour)
    if behaviour != "mute":
        _report_ready(boot, supervisor)
    poller, worker_epoch = Poller([supervisor]), boot.worker_epoch
    while True:
        poller.wait(LOOK_SECONDS if boot.role == "api_server" else None)
        for message in supervisor.receive():
            if isinstance(message, Shutdown):
                if behaviour != "stubborn":
                    return
                continue
            if isinstance(message, Ping):
                for answer in _answers(boot, worker_epoch, bool(waits)):
                    supervisor.send(answer)
                continue
            told = message if not isinstance(message, NextEngine) else "NextEngine"
            supervisor.send(Notice(boot.role, boot.index, f"received {told}"))
            if isinstance(message, NewWorkers):
                worker_epoch = message.worker_epoch
                supervisor.send(WorkersReady(worker_epoch))
            if boot.role == "api_server":
                front_end.obey(message)
        front_end.look()


class FrontEnd:
    """What a front end answers; `busy` ones have two requests at the engine of their birth."""

    def __init__(self, boot: ProcessBoot, supervisor: Link, behaviour: str) -> None:
        self.boot = boot
        self.supervisor = supervisor
        self.wants_drain = behaviour == "asked_to_drain"
        self.wants_aborts = behaviour == "asked_to_abort"
        self.num_requests = 2 if behaviour == "busy" and not boot.incarnation else 0
        self.epoch = boot.epoch
        self.met: list[NextEngine] = []
        self.left: list[Message] = []
        if behaviour in ("busy", "asked_to_drain", "asked_to_abort"):
            signal.signal(signal.SIGUSR2, self.finish)

    def finish(self, number: int, frame: FrameType | None) -> None:
        """The requests end, or an operator calls."""
        index, self.num_requests = self.boot.index, 0
        said: Message = DrainRequested(index) if self.wants_drain else DrainProgress(index, 0)
        if self.wants_aborts:
            said = AbortRequests(["cmpl-1"], "alice")
        for message in [said, *self.left]:
            self.supervisor.send(message)

    def look(self) -> None:
        """Is the engine that is to come ready?"""
        for each in list(self.met):
            if each.in_place or os.path.exists(ready_file(self.boot.run_dir, each.epoch)):
                self.met.remove(each)
                self.supervisor.send(NextReady(self.boot.index, each.epoch))

    def obey(self, message: Message) -> None:
        index = self.boot.index
        if isinstance(message, Drain):
            self.supervisor.send(DrainProgress(index, self.num_requests))
        elif isinstance(message, NextEngine):
            self.met = [message]
        elif isinstance(message, DropEngine):
            self.met = []
        elif isinstance(message, SwitchEngine) and message.epoch != self.epoch:
            self.left, self.epoch = [OldEngineIdle(index, self.epoch)], message.epoch
            self.supervisor.send(Switched(index, self.epoch))
            if not self.num_requests:
                self.supervisor.send(self.left.pop())
        elif isinstance(message, NewEngine):
            self.epoch = message.epoch


def ready_file(run_dir: str, epoch: int) -> str:
    """Is there when the engine of the epoch is ready."""
    return os.path.join(run_dir, f"ready{epoch}")


def _answers(boot: ProcessBoot, worker_epoch: int, waits: bool) -> list[Message]:
    """To a Ping. The engine knows of the next workers before there are any: it says so again."""
    if boot.role != "engine_core":
        return [Alive()]
    awaits = (0,) if waits and worker_epoch == 1 else ()
    alive = EngineAlive(worker_epoch, 100, awaits, ready=True, has_work=bool(awaits))
    return [alive, WorkersReady(worker_epoch)]


def _crack(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("the core is cracked")


def _report_ready(boot: ProcessBoot, supervisor: Link) -> None:
    if boot.role == "engine_core":
        supervisor.send(Notice(boot.role, boot.index, "the pool is small"))
        Path(ready_file(boot.run_dir, boot.epoch)).touch()
        supervisor.send(EngineReady(PROTOCOL_VERSION, boot.epoch, 128, 64, 16, 256, "fake"))
        supervisor.send(WorkersReady(boot.worker_epoch))
    if boot.role == "api_server":
        supervisor.send(FrontEndReady(boot.index))


if __name__ == "__main__":
    chosen = sys.argv.pop(1)
    process.run(lambda boot, supervisor: main(boot, supervisor, chosen))
