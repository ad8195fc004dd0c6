"""A process of the daemon that does nothing but live and die: `fake_process.py BEHAVIOUR`.

good             reports ready, tells the operator what it hears, ends on Shutdown
stubborn         reports ready, ignores Shutdown and SIGTERM
bad_model        fails over its model while starting
bad_model_later  in its second life, whatever the first one ends of
exits            ends without a word, status 3, while starting
mute             never reports ready
orphans          leaves a process without its parent behind, names it, and is good

Whoever is sent SIGUSR2 fails with an error. Of an engine that is sent SIGHUP the first worker
owes an answer from then on; one that is sent SIGIO gives up front end 0, and sent SIGALRM it says
that worker 0 babbles.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from proto import PROTOCOL_VERSION, process
from proto.codec import Message
from proto.errors import ModelError
from proto.lifecycle import (
    Alive,
    Distrust,
    EngineAlive,
    EngineReady,
    FrontEndReady,
    FrontEndStalled,
    NewWorkers,
    Notice,
    Ping,
    ProcessBoot,
    Progress,
    Shutdown,
    WorkersReady,
)
from proto.sockets import Link, Poller


def main(boot: ProcessBoot, supervisor: Link, behaviour: str) -> None:
    if behaviour == "exits":
        os._exit(3)
    if behaviour == "bad_model" or (behaviour == "bad_model_later" and boot.incarnation):
        raise ModelError("config.json asks for rope type 'moebius'")
    signal.signal(signal.SIGUSR2, _crack)
    waits: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, frame: waits.append(number))
    signal.signal(signal.SIGIO, lambda *_: supervisor.send(FrontEndStalled(0, 0)))
    babbles = Distrust("worker", 0, boot.worker_epoch, "it babbles")
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
    if behaviour != "mute":
        _report_ready(boot, supervisor)
    poller, worker_epoch = Poller([supervisor]), boot.worker_epoch
    while True:
        poller.wait()
        for message in supervisor.receive():
            if isinstance(message, Shutdown):
                if behaviour != "stubborn":
                    return
                continue
            if isinstance(message, Ping):
                for answer in _answers(boot, worker_epoch, bool(waits)):
                    supervisor.send(answer)
                continue
            supervisor.send(Notice(boot.role, boot.index, f"heard {message}"))
            if isinstance(message, NewWorkers):
                worker_epoch = message.worker_epoch
                supervisor.send(WorkersReady(worker_epoch))


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
        supervisor.send(EngineReady(PROTOCOL_VERSION, boot.epoch, 128, 64, 16, 256, "fake"))
        supervisor.send(WorkersReady(boot.worker_epoch))
    if boot.role == "api_server":
        supervisor.send(FrontEndReady(boot.index))


if __name__ == "__main__":
    chosen = sys.argv.pop(1)
    process.run(lambda boot, supervisor: main(boot, supervisor, chosen))
