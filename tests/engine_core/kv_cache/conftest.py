"""Small KV caches, checked for integrity after each test."""

import pytest

from engine_core.kv_cache import integrity
from tests.fakes.kv_requests import Setup, make_manager


@pytest.fixture
def kv():
    """Ten usable blocks of 16 tokens; checked for integrity after the test."""
    setup = Setup(make_manager(11))
    yield setup
    assert integrity.check(setup.manager) == []


@pytest.fixture
def small(request):
    """Blocks of 4 tokens; the number of usable ones is the parameter."""
    setup = Setup(make_manager(request.param + 1, block_size=4))
    yield setup
    assert integrity.check(setup.manager) == []
