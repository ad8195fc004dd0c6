"""Shared by the tests of proto."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def short_dir():
    """A directory whose paths fit a Unix socket; pytest's own are often too long."""
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield Path(path)
