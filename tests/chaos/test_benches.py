"""The random chaos and the soak, shortened: they run, and find nothing."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.daemon import TOKEND

pytestmark = pytest.mark.long


def bench(*words: str) -> str:
    done = subprocess.run(
        [str(TOKEND), "bench", *words], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_little_chaos() -> None:
    text = bench("chaos", "--minutes", "0.3", "--kills", "4", "--tokens", "32")
    figures = dict(re.findall(r"^(\w+) +([\d,]+)", text, re.MULTILINE))
    assert (figures["kills"], figures["failed"], figures["different"]) == ("4", "0", "0")
    assert int(figures["tokens"].replace(",", "")) > 1_000


def test_a_short_soak(tmp_path: Path) -> None:
    plot = tmp_path / "soak.html"
    text = bench("soak", "--requests", "3000", "--every", "1", "--plot", str(plot))
    assert "3,0" in text
    assert "against a worker without one" in text
    assert plot.read_text().count("<svg") == 6
