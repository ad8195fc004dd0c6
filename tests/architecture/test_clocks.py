"""Only displayed times use the wall clock, which may jump; time limits use a monotonic clock."""

import ast

import pytest

from tests.architecture.test_imports import FOLDERS, FOREIGN, ROOT

WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.today", "datetime.utcnow"}
WALL_CLOCKS |= {"time.localtime", "time.gmtime", "time.ctime", "time.strftime", "date.today"}

DISPLAYED = {
    ("api_server/metrics/metrics.py", "time.time"),
    ("api_server/generation/app_state.py", "time.time"),  # `created` of the model
    ("api_server/generation/request_builder.py", "time.time"),  # `created` of a response
    ("api_server/routes/pooling.py", "time.time"),  # `created` of a response
    ("api_server/generation/tracing.py", "time.time"),  # start and end of a span
    ("api_server/generation/encoders/responses/encoder.py", "time.time"),  # `completed_at`
    ("engine_core/kv_events.py", "time.time"),  # of a batch
    ("engine_core/trace/file.py", "time.time"),  # when a trace began
    ("deploy/bench/serve.py", "datetime.now"),  # when a measurement began
    ("api_server/text/chat_template.py", "datetime.now"),  # the date in a chat template
    ("api_server/text/harmony.py", "datetime.now"),  # the date in a system message
}


def wall_clocks_in(source: str) -> set[str]:
    """Return the wall clocks that a module names, under any form of import."""
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
        for name in wall_clocks_in(path.read_text())
    }
    assert found == DISPLAYED


@pytest.mark.parametrize("name", sorted(WALL_CLOCKS))
def test_the_check_finds_wall_clocks(name: str) -> None:
    assert wall_clocks_in(f"import time\ndeadline = {name}() + 5") == {name}
    assert wall_clocks_in(f"clock = {name}") == {name}
    assert wall_clocks_in(f"import datetime\nclock = datetime.{name}") == {name}


def test_the_check_finds_a_wall_clock_imported_by_name() -> None:
    assert wall_clocks_in("from time import monotonic, time") == {"time.time"}
