"""Programs started by a measurement end with it."""

import signal
import subprocess
import sys

import pytest

from deploy.bench import servers as program
from deploy.bench.servers import OwnedProcess

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
WAITS = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("source", "number"), [(WAITS, signal.SIGTERM), (f"{STUBBORN}; {WAITS}", signal.SIGKILL)]
)
def test_a_program_that_ignores_sigterm_is_killed(
    monkeypatch: pytest.MonkeyPatch, source: str, number: signal.Signals
) -> None:
    monkeypatch.setattr(program, "END_SECONDS", 0.2 if number == signal.SIGKILL else 20.0)
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        with OwnedProcess(process):
            assert process.stdout is not None
            process.stdout.readline()
        assert process.poll() == -number
