"""Process age and start phases, from the kernel's start time."""

import subprocess
import sys
import time

from deploy.supervisor.processes import process_age
from proto.messages.lifecycle import PhaseClock


def test_the_age_counts_from_the_command() -> None:
    """The kernel's resolution is 10 ms; Python's own start takes part of the age."""
    before = time.monotonic()
    code = "from deploy.supervisor.processes import process_age; print(process_age())"
    age = float(subprocess.check_output([sys.executable, "-c", code]))
    assert 0.0 < age <= time.monotonic() - before + 0.02
    assert process_age() > age


def test_phases_are_consecutive() -> None:
    begun = time.monotonic() - 2.0
    clock = PhaseClock(begun)
    clock.end("first")
    clock.end("second")
    first, second = clock.phases
    assert (first.what, second.what) == ("first", "second")
    assert first.seconds >= 2.0
    assert second.seconds >= 0.0
    assert first.seconds + second.seconds <= clock.seconds
