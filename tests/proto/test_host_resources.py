"""Limits of a process that works on data which is not trusted."""

import os
import resource
import subprocess
import sys
from pathlib import Path

LIMITED = """
import os, resource, signal
from proto.host_resources import process_limits
with process_limits(60.0, 1 << 30):
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        assert os.WTERMSIG(status) == signal.SIGABRT and not os.WCOREDUMP(status)
    else:
        os.abort()
limit = resource.getrlimit(resource.RLIMIT_CORE)
assert limit[0] == limit[1], limit
"""


def test_a_crash_within_limits_leaves_no_core_file(tmp_path) -> None:
    def allow_cores() -> None:
        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))

    command = [sys.executable, "-c", LIMITED]
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    subprocess.run(command, cwd=tmp_path, env=env, preexec_fn=allow_cores, check=True)
    assert not list(tmp_path.iterdir())
