"""Fixtures of the worker's tests."""

import pytest

from worker.kernels import Kernels, KernelsUnavailableError, load_kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """Those that this machine loads; without any the test is skipped."""
    try:
        return load_kernels()
    except KernelsUnavailableError as reason:
        pytest.skip(str(reason))
