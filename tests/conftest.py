"""Tests that need a GPU are skipped where there is none; the summary says how many.

There kernels of Triton are interpreted, its own functions too: it asks when it is imported.
"""

import os
from pathlib import Path

import pytest

HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
