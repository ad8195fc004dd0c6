"""A process of the daemon that does nothing but live and die: `fake_process.py BEHAVIOUR`.

good             reports ready, tells the operator what it hears, ends on Shutdown
stubborn         reports ready, ignores Shutdown and SIGTERM
bad_model        fails over its model while starting
bad_model_later  in its second life, whatever the first one ends of
exits            ends without a word, status 3, while starting
busy             is good, and in its first life has two requests under way until SIGUSR2
asked_to_drain   is good, and an operator asks it at SIGUSR2 that the daemon drains
orphans          leaves a process without its parent behind, names it, and is good

Whoever is sent SIGUSR1 fails with an error.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from proto import PROTOCOL_VERSION, process
from proto.errors import ModelError
from proto.lifecycle import (
    Drain,
    DrainWanted,
    EngineReady,
    FrontEndReady,
    NewWorkers,
    Notice,
    ProcessBoot,
    Progress,
    Shutdown,
    UnderWay,
    WorkersReady,
)
from proto.sockets import Link, Poller


def main(boot: ProcessBoot, supervisor: Link, behaviour: str) -> None:
    if behaviour == "exits":
        os._exit(3)
    if behaviour == "bad_model" or (behaviour == "bad_model_later" and boot.incarnation):
        raise ModelError("config.json asks for rope type 'moebius'")
    signal.signal(signal.SIGUSR1, _crack)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "orphans":
        pid = subprocess.check_output(["sh", "-c", "sleep 60 >&- & echo $!"], text=True)
        supervisor.send(Notice(boot.role, boot.index, f"orphan {pid}"))
    supervisor.send(Progress(boot.role, boot.index, "loading weights", 0.5))
    if boot.incarnation:
        lives = f"life {boot.incarnation}, epochs {boot.epoch} and {boot.worker_epoch}"
        supervisor.send(Notice(boot.role, boot.index, f"{lives}, front ends {boot.front_ends}"))
    num_requests = 2 if behaviour == "busy" and not boot.incarnation else 0
    said = DrainWanted(boot.index) if behaviour == "asked_to_drain" else UnderWay(boot.index, 0)
    signal.signal(signal.SIGUSR2, lambda number, frame: supervisor.send(said))
    _report_ready(boot, supervisor)
    poller = Poller([supervisor])
    while True:
        poller.wait()
        for message in supervisor.receive():
            if isinstance(message, Shutdown):
                if behaviour != "stubborn":
                    return
                continue
            supervisor.send(Notice(boot.role, boot.index, f"heard {message}"))
            if isinstance(message, Drain):
                supervisor.send(UnderWay(boot.index, num_requests))
            if isinstance(message, NewWorkers):
                supervisor.send(WorkersReady(message.worker_epoch))


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
