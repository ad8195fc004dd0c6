"""The scheduler's tests, of its sources or, with TOKEND_TEST_COMPILED=1, of its compiled form."""

import os

import pytest

from engine_core.compiled import use_compiled

COMPILED = bool(os.environ.get("TOKEND_TEST_COMPILED"))

if COMPILED:
    assert use_compiled(), "not compiled from these sources: python -m engine_core.build_compiled"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compiled objects have no attributes to replace, and constants are in the code."""
    skip = pytest.mark.skip(reason="replaces something inside the scheduler")
    for item in items:
        if COMPILED and item.get_closest_marker("interpreted"):
            item.add_marker(skip)
