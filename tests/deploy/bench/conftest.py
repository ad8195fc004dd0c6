import contextlib

import pytest


@pytest.fixture(autouse=True)
def heap_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs collect no garbage first: that of a test process with all its modules takes a second.

    test_serving.py tests what runs do otherwise.
    """
    monkeypatch.setattr("deploy.bench.load.frozen_heap", contextlib.nullcontext)
