"""The model is prepared once more, by a process that may do anything."""

import os
import select
import sys

import pytest

from deploy.reload.actions import PreparationProcess
from proto.codec import to_json_line
from proto.errors import ModelError
from tests.fakes import boots

LIMIT_MILLISECONDS = 20_000


def ended(script: str, *arguments: str) -> PreparationProcess:
    """One that has ended, as its descriptor says."""
    preparation = PreparationProcess([sys.executable, "-c", script, *arguments], os.environ)
    poll = select.poll()
    poll.register(preparation.fileno(), select.POLLIN)
    assert poll.poll(LIMIT_MILLISECONDS)
    assert preparation.has_ended()
    return preparation


def test_the_manifest_is_the_result() -> None:
    preparation = ended("import sys; print(sys.argv[1])", to_json_line(boots.model()).decode())
    assert preparation.result() == boots.model()
    preparation.close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import sys; print('x'); sys.exit('loading …\\ntokend: no such file')", "no such file"),
        ("import sys; sys.exit(3)", "preparing the model ended with exit status 3"),
        ("print('{}')", "preparing the model printed no manifest: .*"),
        ("", "preparing the model printed no manifest: .*"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(script: str, reason: str) -> None:
    preparation = ended(script)
    with pytest.raises(ModelError, match=rf"\A{reason}\Z"):
        preparation.result()
    preparation.close()


def test_one_that_is_not_needed_any_more_ends_at_once() -> None:
    """Also where it has started something that goes on."""
    script = "import subprocess, time; subprocess.Popen(['sleep', '2']); time.sleep(60)"
    preparation = PreparationProcess([sys.executable, "-c", script], os.environ)
    before = set(os.listdir("/proc/self/fd"))
    preparation.close()
    assert preparation.has_ended()
    assert len(before - set(os.listdir("/proc/self/fd"))) >= 3


def test_a_command_that_is_not_there_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="nowhere"):
        PreparationProcess(["/nowhere/tokend"], os.environ)
    assert len(os.listdir("/proc/self/fd")) == len(before)
