"""With scarce resources the daemon serves, or ends with a one-line reason."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("settings")

ROOT = Path(__file__).parents[2]
REQUEST = {"prompt": "The sea is", "max_tokens": 4, "temperature": 0}
DESCRIPTORS = 256


def completes(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(f"{url}/v1/completions", json=REQUEST, timeout=60).status_code == 200
    return False


def test_few_file_descriptors() -> None:
    """Connections beyond the limit wait or fail; afterwards the daemon serves as before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, before[1]))
    try:
        daemon = Daemon()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with daemon:
        assert completes(daemon.url)
        pids = {role: each.pid for role, each in daemon.processes().items()}
        address = ("127.0.0.1", httpx.URL(daemon.url).port)
        with contextlib.ExitStack() as connections:
            for _ in range(DESCRIPTORS + 50):
                connections.enter_context(socket.create_connection(address, timeout=5))
        assert eventually(lambda: completes(daemon.url), 30)
        assert {role: each.pid for role, each in daemon.processes().items()} == pids


def test_an_unwritable_model_folder_is_one_clear_error() -> None:
    daemon = Daemon(environment={"XDG_CACHE_HOME": "/proc/nowhere"})
    assert daemon.wait_exit(60) == 2
    (line,) = [each for each in daemon.output if each.startswith("tokend: ")]
    assert "/proc/nowhere" in line


INSIDE = """
import fcntl, httpx, os, socket, struct, subprocess, sys
from pathlib import Path
from tests.e2e.daemon import Daemon

with socket.socket() as any_socket:  # the loopback device of a new network is down
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm"], check=True)
home = str(Path.home())
subprocess.run(["mount", "--bind", home, home], check=True)
subprocess.run(["mount", "-o", "remount,ro,bind", home], check=True)
try:
    Path(home, "x").touch()
except OSError:
    pass
else:
    raise SystemExit("the home can be written to")
with Daemon() as daemon:
    request = %s
    print(httpx.post(f"{daemon.url}/v1/completions", json=request, timeout=60).status_code)
"""


def test_no_network_read_only_home_and_little_shared_memory() -> None:
    """Combined, in separate namespaces, with a model that was prepared before."""
    apart = ["unshare", "--net", "--mount"]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode:
        pytest.skip("no permission to create namespaces")
    with Daemon():
        pass  # fetches and prepares the model if necessary
    script = INSIDE % json.dumps(REQUEST)
    done = subprocess.run(
        [*apart, sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == ["200"], done.stdout + done.stderr
