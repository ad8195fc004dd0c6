"""`tokend plan` says whether the machine was busy while it measured."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.runtime.host_resources import ALLOWED_CPUS
from tests.e2e.daemon import TOKEND
from worker.commands.plan import BUSY_CORES, OtherLoad, busy_line


def write_stat(root: Path, **ticks: int) -> None:
    """Write a /proc/stat in which every core has these ticks, and 10^9 idle ones."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest")
    line = " ".join(str(ticks.get(name, 10**9 if name == "idle" else 0)) for name in names)
    cores = [f"cpu{number} {line}" for number in range(512)]
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "stat").write_text("\n".join([f"cpu {line}", *cores, "intr 5 6", "ctxt 7"]))


@pytest.mark.parametrize("kind", ["user", "nice", "system", "irq", "softirq", "steal"])
def test_time_of_others_on_our_cores_counts(tmp_path: Path, kind: str) -> None:
    write_stat(tmp_path)
    begin, own = time.monotonic(), time.process_time()
    load = OtherLoad(tmp_path)
    write_stat(tmp_path, **{kind: 100 * os.sysconf("SC_CLK_TCK")})  # 100 s on each core
    used = load.cores()
    longest = time.monotonic() - begin
    own = time.process_time() - own
    assert used >= (100 * len(ALLOWED_CPUS) - own) / max(longest, 1e-3)


def test_waiting_and_own_work_do_not_count(tmp_path: Path) -> None:
    write_stat(tmp_path)
    load = OtherLoad(tmp_path)
    while time.process_time() < load._own + 0.05:
        pass
    write_stat(tmp_path, iowait=10**6)
    assert load.cores() == 0.0
    assert busy_line(BUSY_CORES / 2) == ""
    assert "1.5 of" in busy_line(1.5)


@pytest.fixture
def busy() -> Iterator[None]:
    """A program that keeps a core busy."""
    program = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    assert program.stdout is not None
    program.stdout.readline()
    yield
    program.kill()
    program.communicate()


@pytest.mark.suite("daemons")
@pytest.mark.usefixtures("busy")
def test_a_plan_names_the_load(tmp_path: Path) -> None:
    text = subprocess.run([*TOKEND, "plan"], capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in text.splitlines() if line.startswith("  busy "))
    assert "these are the rates of a busy machine, and an idle one is faster" in line
    words = [*TOKEND, "plan", "--json"]
    figures = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert figures["cores_used_by_others"] > BUSY_CORES


@pytest.mark.suite("daemons")
def test_a_plan_of_several_engines_is_that_of_each() -> None:
    words = [*TOKEND, "plan", "-dp", "2", "--cpu-threads", "1", "--standby-engines", "2"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "; 2 engines, and for each of them\n" in text
    (free,) = (line for line in text.splitlines() if line.startswith("  free "))
    assert "memory of this machine for each of 2 engines" in free or "container for each" in free
    (shared,) = (line for line in text.splitlines() if line.startswith("  shared "))
    assert "weights are in memory once" in shared
    assert "\n  standby          2 engines, 30 MiB of the work space; their threads sleep\n" in text
    as_json = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    figures = json.loads(as_json.stdout)
    assert figures["engines"] == 2
    assert figures["free_bytes"] <= figures["total_bytes"] / 2
    whole = sum(figures["weights_bytes"].values())
    assert figures["weights_of_other_engines_bytes"] == pytest.approx(whole / 2, rel=0.01)
