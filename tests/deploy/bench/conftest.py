import contextlib

import pytest


@pytest.fixture(autouse=True)
def heap_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection before a run, which takes a second in a test process.

    test_serving.py tests it.
    """
    monkeypatch.setattr("deploy.bench.load.frozen_heap", contextlib.nullcontext)
