"""Reaping adopted orphans, in separate processes, since it reaps all children not named."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, subprocess, sys
from deploy.supervisor.processes import reap_adopted

def ended(status):
    child = subprocess.Popen(["sh", "-c", f"exit {status}"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child

def in_process_table(pid):
    return os.path.exists(f"/proc/{pid}")
"""


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_unknown_children_are_reaped() -> None:
    run("""
strangers = [ended(1), ended(2)]
running = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
reap_adopted(set())
assert not any(in_process_table(each.pid) for each in strangers)
assert running.poll() is None
running.kill()
running.wait()
""")


def test_the_exit_status_of_known_children_is_left_to_their_parent_code() -> None:
    run("""
ours = ended(7)
reap_adopted({ours.pid})
stranger = ended(1)
reap_adopted({ours.pid})
assert ours.wait() == 7
reap_adopted(set())
assert not in_process_table(stranger.pid)
""")


def test_reaping_without_children_does_nothing() -> None:
    run("reap_adopted(set())")
