from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.supervised import FakeDaemon, Start


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start daemons with the arguments of `fake_daemon.py` and environment variables."""
    daemons = []

    def begin(*choices: str, run_parent: Path | None = None, **variables: str) -> FakeDaemon:
        daemon = FakeDaemon(run_parent or tmp_path_factory.mktemp("run"), *choices, **variables)
        daemons.append(daemon)
        return daemon

    yield begin
    for daemon in daemons:
        daemon.discard()


@pytest.fixture
def begin(start: Start) -> Start:
    """Start a daemon and wait until it is ready."""

    def ready(*choices: str) -> FakeDaemon:
        daemon = start(*choices)
        daemon.wait_ready()
        return daemon

    return ready
