"""Phases with every kind of ending, for tests of the phase runner."""

import os
import subprocess
import sys
import threading

from tests.gpu.report import Report, demand


def fine(report: Report) -> None:
    report.figure("rate", 2.5)


def misses(report: Report) -> None:
    report.miss("batch 1: 0.80")
    report.figure("rate", 2.5)


def fails(report: Report) -> None:
    report.figure("rate", 2.5)
    demand(False, "2 is not 3")


def breaks(report: Report) -> None:
    report.figure("rate", 1 / len([]))


def dies(report: Report) -> None:
    report.figure("rate", 2.5)
    os._exit(7)


def hangs(report: Report) -> None:
    """Hang, with a child in a session of its own; its process id is a figure."""
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    daemon = subprocess.Popen(command, start_new_session=True)
    report.figure("daemon", daemon.pid)
    threading.Event().wait()
