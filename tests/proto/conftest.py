"""Fixtures of the tests of `proto`."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def short_dir():
    """A temporary directory with a path short enough for Unix sockets, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield Path(path)
