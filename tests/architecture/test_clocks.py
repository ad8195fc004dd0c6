"""The wall clock may jump; nothing but what is shown to people looks at it."""

import ast

import pytest

from tests.architecture.test_imports import FOLDERS, FOREIGN, ROOT

WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.today", "datetime.utcnow"}
WALL_CLOCKS |= {"time.localtime", "time.gmtime", "time.ctime", "time.strftime", "date.today"}

SHOWN_ONLY = {
    ("api_server/app_state.py", "time.time"),  # `created` of the model
    ("api_server/request_builder.py", "time.time"),  # `created` of an answer
    ("api_server/tracing.py", "time.time"),  # start and end of a span
    ("api_server/protocol/responses/encoder.py", "time.time"),  # `completed_at` of a response
    ("engine_core/trace/file.py", "time.time"),  # when a trace began
    ("deploy/bench/serve.py", "datetime.now"),  # when a measurement began
    ("api_server/text/chat_template.py", "datetime.now"),  # what a template calls today
}


def looks_at_the_wall(source: str) -> set[str]:
    """Names of wall clocks that a module mentions, however it has imported them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if type(node) is ast.Attribute:
            names.add(".".join(ast.unparse(node).split(".")[-2:]))
        elif type(node) is ast.ImportFrom:
            names |= {f"{node.module}.{each.name}" for each in node.names}
    return names & WALL_CLOCKS


def test_time_limits_do_not_depend_on_the_wall_clock() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if FOREIGN not in path.parents
        for name in looks_at_the_wall(path.read_text())
    }
    assert found == SHOWN_ONLY


@pytest.mark.parametrize("name", sorted(WALL_CLOCKS))
def test_the_search_sees_a_wall_clock(name: str) -> None:
    assert looks_at_the_wall(f"import time\ndeadline = {name}() + 5") == {name}
    assert looks_at_the_wall(f"clock = {name}") == {name}
    assert looks_at_the_wall(f"import datetime\nclock = datetime.{name}") == {name}


def test_the_search_sees_one_that_is_imported_by_itself() -> None:
    assert looks_at_the_wall("from time import monotonic, time") == {"time.time"}
