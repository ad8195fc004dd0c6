"""Daemons and the browser shared by the end-to-end tests, and the reference model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.daemon import Daemon, DaemonPool
from tests.e2e.reference import Reference
from tests.e2e.visitor import CHROMIUM, KEY, Visitor


@pytest.fixture(scope="session")
def daemons() -> Iterator[DaemonPool]:
    """`with daemons.borrow(*flags) as daemon`: a running, idle daemon shared with other tests."""
    pool = DaemonPool()
    yield pool
    pool.stop_all()


@pytest.fixture
def daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    """A shared daemon of the packaged model with default settings."""
    with daemons.borrow() as running:
        yield running


@pytest.fixture
def exact_daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    """A shared daemon of the packaged model in float32, for tests that compare with `reference`."""
    with daemons.borrow("--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> Reference:
    """transformers on the same GGUF file in float32."""
    return Reference.load()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def guarded() -> Iterator[Daemon]:
    """A daemon with an API key and few blocks, so that block states are visible."""
    flags = ("--api-key", KEY, "--metrics-open", "--num-gpu-blocks-override", "300")
    with Daemon(*flags) as running:
        yield running


@pytest.fixture
def visit(browser: Any, guarded: Daemon) -> Iterator[Callable[..., Visitor]]:
    """visit(tab) opens the page with the key; fails at the end if `wrong` is not empty."""
    visitors: list[Visitor] = []

    def open_page(tab: str = "chat", key: str = KEY, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, guarded.url, tab, key, **options))
        return visitors[-1]

    yield open_page
    for each in visitors:
        wrong = each.wrong
        each.close()
        assert wrong == []
