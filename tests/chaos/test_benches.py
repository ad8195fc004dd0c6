"""Short runs of the chaos benchmark and the soak test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.daemon import TOKEND
from tests.run import ROOT

SOAK = (sys.executable, "-m", "tests.benchmarks.soak")

pytestmark = pytest.mark.suite("chaos")


def bench(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )


def test_a_short_chaos_run_finds_nothing(tmp_path: Path) -> None:
    """Counts must be right on any machine; durations depend on its load."""
    file = tmp_path / "chaos.json"
    words = ("--minutes", "0.3", "--kills", "4", "--tokens", "32", "--json", str(file))
    done = bench(*TOKEND, "bench", "chaos", *words)
    found = json.loads(file.read_text())
    missed = [each["name"] for each in found["limits"] if not each["met"]]
    assert [each for each in missed if "gap" not in each] == [], done.stdout + done.stderr
    assert done.returncode == (1 if missed else 0)
    assert len(found["kills"]) == 4
    assert found["tokens"] > 1_000


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    plot = tmp_path / "soak.html"
    done = bench(*SOAK, "--requests", "60000", "--every", "1", "--plot", str(plot))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60,0" in done.stdout
    assert "against a worker without one" in done.stdout
    assert plot.read_text().count("<svg") == 6
