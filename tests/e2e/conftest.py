"""Daemons shared by the end-to-end tests, and the reference model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, DaemonPool
from tests.e2e.reference import Reference


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep together what shares a daemon: a file, and all that loads the reference model."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            uses_reference = "reference" in getattr(item, "fixturenames", ())
            group = "reference" if uses_reference else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def daemons() -> Iterator[DaemonPool]:
    """`with daemons.borrow(*flags) as daemon`: a running one, empty, that other tests use too."""
    pool = DaemonPool()
    yield pool
    pool.stop_all()


@pytest.fixture
def daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    """The packaged model in float32, default settings otherwise."""
    with daemons.borrow("--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> Reference:
    """transformers on the same GGUF, float32."""
    return Reference.load()
