"""llama.cpp's server tests, unmodified, against daemons of small models.

`llama_cpp_plugin.py` starts daemons where the tests start servers. `llama_cpp_server.toml` says
which tests pass, and why each other does not apply.
"""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.peers.packages import LLAMA_CPP, unpack_package
from tests.run import ROOT

SECONDS = 580.0
pytestmark = [pytest.mark.suite("peers"), pytest.mark.timeout(SECONDS + 20)]
TABLE = tomllib.loads(Path(__file__).with_name("llama_cpp_server.toml").read_text())
PASSING = ("passes", "vacuous")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Run all files; return the outcome of each test by file and name."""
    (folder,) = unpack_package(LLAMA_CPP).glob("*/llama.cpp/tools/server/tests")
    written = tmp_path_factory.mktemp("llama.cpp") / "outcomes.json"
    plugins = ("tests.peers.llama_cpp_plugin", "no:cacheprovider", "no:xdist")
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-q", "--tb=short", "--timeout", "60", "unit"),
            *(f"-p{plugin}" for plugin in plugins),
            f"--outcomes={written}",
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = run.communicate(timeout=SECONDS)
    except BaseException:
        run.send_signal(signal.SIGINT)  # it ends its daemons
        run.wait(30)
        raise
    assert run.returncode in (0, 1), output[-5000:]
    found: dict[str, dict[str, str]] = {path.name: {} for path in folder.glob("unit/test_*.py")}
    for test, outcome in json.loads(written.read_text()).items():
        file, _, name = test.removeprefix("unit/").partition("::")
        found[file][name] = outcome
    return found


def matches(entry: str, name: str) -> bool:
    return entry in ("*", name.partition("[")[0]) or ("[" in entry and name.startswith(entry))


def test_every_file_is_in_the_table(outcomes: dict[str, dict[str, str]]) -> None:
    assert TABLE["files"].keys() == outcomes.keys()
    assert len(outcomes) == 28


@pytest.mark.parametrize("file", TABLE["files"])
def test_outcomes(file: str, outcomes: dict[str, dict[str, str]]) -> None:
    kind_of = {entry: kind for kind, entries in TABLE["files"][file].items() for entry in entries}
    assert set(kind_of.values()) <= TABLE["kinds"].keys()
    wrong, used = {}, set()
    counts = Counter[str]()
    for name, outcome in outcomes[file].items():
        entry = max((entry for entry in kind_of if matches(entry, name)), key=len, default="")
        kind = kind_of.get(entry, "not listed")
        used.add(entry)
        counts[kind] += 1
        if kind == "not listed" or (kind in PASSING) != (outcome == "passed"):
            wrong[name] = f"{kind}: {outcome}"
    print(file, dict(counts))
    assert not wrong
    assert kind_of.keys() <= used, "entries without a test"
