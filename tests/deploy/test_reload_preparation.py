"""The process that prepares the model for a reload, and its failures."""

import os
import select
import sys

import pytest

from deploy.supervisor.epochs import ServedModels
from deploy.supervisor.reload.actions import PreparationProcess
from proto.codec import changed, to_json_line
from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from tests.fakes import lifecycle_messages

LIMIT_MILLISECONDS = 20_000


def ended(script: str, *arguments: str) -> PreparationProcess:
    """Run a script as the preparation; return it after its end."""
    preparation = PreparationProcess([sys.executable, "-c", script, *arguments], os.environ)
    poll = select.poll()
    poll.register(preparation.fileno(), select.POLLIN)
    assert poll.poll(LIMIT_MILLISECONDS)
    assert preparation.has_ended()
    return preparation


@pytest.mark.parametrize("draft_model", [None, changed(lifecycle_messages.model(), name="draft")])
def test_the_manifests_are_the_result(draft_model: PreparedModel | None) -> None:
    models = ServedModels(lifecycle_messages.model(), draft_model)
    lines = (to_json_line(each).decode() for each in models if each is not None)
    preparation = ended("import sys; print(*sys.argv[1:], sep='')", *lines)
    assert preparation.result() == models
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
def test_failures_are_reported_in_one_line(script: str, reason: str) -> None:
    preparation = ended(script)
    with pytest.raises(ModelError, match=rf"\A{reason}\Z"):
        preparation.result()
    preparation.close()


def test_close_ends_a_running_preparation_at_once() -> None:
    """Even if the preparation has started a process that continues."""
    script = "import subprocess, time; subprocess.Popen(['sleep', '2']); time.sleep(60)"
    preparation = PreparationProcess([sys.executable, "-c", script], os.environ)
    before = set(os.listdir("/proc/self/fd"))
    preparation.close()
    assert preparation.has_ended()
    assert len(before - set(os.listdir("/proc/self/fd"))) >= 3


def test_a_missing_command_leaves_no_open_descriptors() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="nowhere"):
        PreparationProcess(["/nowhere/tokend"], os.environ)
    assert len(os.listdir("/proc/self/fd")) == len(before)
