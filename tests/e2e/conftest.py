"""Daemons shared by the end-to-end tests, and the reference model."""

from collections.abc import Iterator

import pytest

from tests.e2e.daemon import Daemon
from tests.e2e.reference import Reference


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """The packaged model in float32, default settings otherwise."""
    with Daemon("--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> Reference:
    """transformers on the same GGUF, float32."""
    return Reference.load()
