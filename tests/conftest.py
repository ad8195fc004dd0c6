"""Selection of suites, time limits of single tests, and skipping of tests that need a GPU.

Without a GPU, tests that need one are skipped and Triton kernels are interpreted (Triton reads its
variable when it is imported).
"""

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.run import ROOT
from tests.suites import SUITES

HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so starts a shell what it runs behind it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the programs of tests inherit it

SUITE_OF = {"engine_core": "engine", "benchmarks": "bench"}
"""Suites of the folders in tests/ whose tests are not `quick`."""

PROGRESS = os.environ.get("TOKEND_TEST_PROGRESS")
"""The file in which tests/run.py sees which test runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", default="", help="run these suites, separated by commas")


def suite_of(item: pytest.Item) -> str:
    """The suite that the nearest marker of an item names, or that of its folder (`SUITE_OF`).

    Tests of the engine that replace parts of the scheduler need its sources: they are `quick`.
    """
    own = [mark for mark in item.own_markers if mark.name == "suite"]
    # The mark of a parameter is the last one.
    marker = own[-1] if own else item.get_closest_marker("suite")
    if marker is None:
        if item.get_closest_marker("interpreted"):
            return "quick"
        folders = [each for each in SUITE_OF if item.path.is_relative_to(ROOT / "tests" / each)]
        return SUITE_OF[folders[0]] if folders else "quick"
    (name,) = marker.args
    if name not in {suite.name for suite in SUITES}:
        raise pytest.UsageError(f"{item.nodeid}: tests/suites.py has no suite {name!r}")
    return str(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suites = [name for name in config.getoption("--suite").split(",") if name]
    chosen, others = [], []
    for item in items:
        (chosen if not suites or suite_of(item) in suites else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _note(event: str, nodeid: str) -> None:
    if PROGRESS:
        with open(PROGRESS, "a") as file:
            file.write(f"{event} {nodeid}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _note("start", item.nodeid)
    try:
        return (yield)
    finally:
        _note("end", item.nodeid)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Fail a test at its limit with all stacks in its report, which pytest-xdist passes on.

    pytest-timeout's own handlers write the stacks to the terminal of the worker process, which
    pytest-xdist does not show, and do not know of asyncio tasks.
    """

    def expired(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        pytest.fail(f"no end after {settings.timeout:g} s\n{all_stacks()}", pytrace=True)

    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True


def all_stacks() -> str:
    """Stacks of all threads and of all tasks of the running event loop."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    ]
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs
        tasks = set()
    for task in tasks:
        frames = "".join(_awaiting(task.get_coro()))
        parts.append(f"task {task.get_name()}:\n{frames}")
    return "\n".join(parts)


def _awaiting(awaited: Any) -> Iterator[str]:
    """The frames of a coroutine and of what it awaits, outermost first."""
    while awaited is not None:
        for prefix in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{prefix}_frame", None)
            if frame is not None:
                yield from traceback.format_stack(frame)[-1:]
                break
        else:
            return
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
