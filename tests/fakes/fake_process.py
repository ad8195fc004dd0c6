"""A process of the daemon that does nothing but live and die: `fake_process.py BEHAVIOUR`.

good        reports ready, ends on Shutdown
stubborn    reports ready, ignores Shutdown and SIGTERM
raises      reports ready, then fails with an error
bad_model   fails over its model while starting
exits       ends without a word, status 3, while starting
orphans     leaves a process without its parent behind, names it, and is good
"""

import os
import signal
import subprocess
import sys

from proto import PROTOCOL_VERSION, process
from proto.errors import ModelError
from proto.lifecycle import EngineReady, FrontEndReady, Notice, ProcessBoot, Progress
from proto.sockets import Link, Poller


def main(boot: ProcessBoot, supervisor: Link, behaviour: str) -> None:
    if behaviour == "exits":
        os._exit(3)
    if behaviour == "bad_model":
        raise ModelError("config.json asks for rope type 'moebius'")
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "orphans":
        pid = subprocess.check_output(["sh", "-c", "sleep 60 >&- & echo $!"], text=True)
        supervisor.send(Notice(boot.role, boot.index, f"orphan {pid}"))
    supervisor.send(Progress(boot.role, boot.index, "loading weights", 0.5))
    _report_ready(boot, supervisor)
    if behaviour == "raises":
        raise RuntimeError("the core is cracked")
    poller = Poller([supervisor])
    while True:
        poller.wait()
        if supervisor.receive() and behaviour != "stubborn":
            return


def _report_ready(boot: ProcessBoot, supervisor: Link) -> None:
    if boot.role == "engine_core":
        supervisor.send(Notice(boot.role, boot.index, "the pool is small"))
        supervisor.send(EngineReady(PROTOCOL_VERSION, boot.epoch, 128, 64, 16, 256, "fake"))
    if boot.role == "api_server":
        supervisor.send(FrontEndReady(boot.index))


if __name__ == "__main__":
    chosen = sys.argv.pop(1)
    process.run(lambda boot, supervisor: main(boot, supervisor, chosen))
