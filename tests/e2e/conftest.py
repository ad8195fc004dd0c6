"""Daemons shared by the end-to-end tests, and the reference model."""

from collections.abc import Iterator

import pytest

from tests.e2e.daemon import Daemon, DaemonPool
from tests.e2e.reference import Reference


@pytest.fixture(scope="session")
def daemons() -> Iterator[DaemonPool]:
    """`with daemons.borrow(*flags) as daemon`: a running, idle daemon shared with other tests."""
    pool = DaemonPool()
    yield pool
    pool.stop_all()


@pytest.fixture
def daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    """A shared daemon of the packaged model with default settings."""
    with daemons.borrow() as running:
        yield running


@pytest.fixture
def exact_daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    """A shared daemon of the packaged model in float32, for tests that compare with `reference`."""
    with daemons.borrow("--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> Reference:
    """transformers on the same GGUF file in float32."""
    return Reference.load()
