"""Limits on the Python calls of a step and of a request.

Counted are calls of the five folders' own functions, generators and comprehensions: the part of
their time that does not depend on the machine. After a change that is meant to need more calls,
run the tests of LIMITS with `-rP`, which prints the counts.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

VERSION: Final = (3, 11)
"""Of Python: others call other frames for the same code."""
LIMITS: Final = {
    "engine: a decode of 8 requests": 101,
    "worker on a CPU: a decode of 4 rows, one call of all layers": 79,
    "worker on a CPU: a decode of 4 rows, layer by layer": 142,
    "worker on a GPU: a decode of 2 rows": 171,
    "front end: a completion": 1026,
    "front end: a streamed completion": 1252,
    "front end: one more token of a stream": 56,
}
same_version = pytest.mark.skipif(
    sys.version_info[:2] != VERSION, reason=f"calls are counted on Python {VERSION[0]}.{VERSION[1]}"
)
_ROOT: Final = Path(__file__).resolve().parent.parent
_FOLDERS: Final = tuple(
    f"{_ROOT / folder}/" for folder in ("proto", "engine_core", "worker", "api_server", "deploy")
)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Yield the number of calls in this thread by "file:function", complete after the block."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDERS):
            name = frame.f_code.co_filename.removeprefix(f"{_ROOT}/")
            calls[f"{name}:{frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def check_calls(name: str, calls: Counter[str]) -> None:
    """Print the number of calls, and fail if there are more than LIMITS allows."""
    limit = LIMITS[name]
    print(f"{name}: {calls.total()} calls, at most {limit}")
    listed = "\n".join(f"{count:5} {function}" for function, count in calls.most_common(40))
    assert calls.total() > 0, "nothing was counted"
    assert calls.total() <= limit, f"{name}: {calls.total()} calls, at most {limit}:\n{listed}"
