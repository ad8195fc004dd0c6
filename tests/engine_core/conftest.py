"""Tests of the engine, with the scheduler's sources or, with TOKEND_TEST_COMPILED=1, compiled."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_core.compiled import use_compiled
from proto.settings.config import FrontEndConfig, ServeConfig
from tests.fakes.engine_process import EngineProcess

COMPILED = bool(os.environ.get("TOKEND_TEST_COMPILED"))

if COMPILED:
    assert use_compiled(), "not compiled from these sources: python -m engine_core.build_compiled"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that replace attributes or constants, which compiled code does not allow."""
    skip = pytest.mark.skip(reason="replaces something inside the scheduler")
    for item in items:
        if COMPILED and item.get_closest_marker("interpreted"):
            item.add_marker(skip)


@pytest.fixture
def start() -> Iterator[Callable[..., EngineProcess]]:
    """start(cache=…, …, boot=…): an engine process that ends with the test.

    Its run directory is in /tmp: the paths of tmp_path are too long for sockets.
    """
    engines = []

    def factory(*, boot: dict[str, Any] | None = None, **config: Any) -> EngineProcess:
        engine = EngineProcess(
            "/tmp",
            config=ServeConfig(**config),
            num_front_ends=config.get("frontend", FrontEndConfig()).api_server_count,
            **(boot or {}),
        )
        engines.append(engine)
        return engine

    yield factory
    for engine in engines:
        engine.close()
        assert not os.path.exists(engine.directory.path)
