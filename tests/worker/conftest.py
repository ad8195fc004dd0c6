"""Fixtures of the worker's tests."""

import pytest

from worker.cpu.kernels import Kernels, KernelsUnavailableError, load_kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The kernels that this machine loads; skips the test if there are none."""
    try:
        return load_kernels()
    except KernelsUnavailableError as reason:
        pytest.skip(str(reason))
