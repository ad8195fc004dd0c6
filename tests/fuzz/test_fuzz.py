"""The corpus of earlier campaigns still passes, and a short campaign finds nothing.

TOKEND_FUZZ_SECONDS: duration of a short campaign, 15 by default.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.campaign import Campaign
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("TOKEND_FUZZ_SECONDS", "15"))
HEAVY = {"gguf", "safetensors"}
"""Those that import torch and transformers; a campaign begins with their corpus anyway."""


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - HEAVY))
def test_the_corpus_has_no_findings(name: str) -> None:
    campaign = Campaign(TARGETS[name]())
    campaign.replay()
    campaign.target.close()
    assert campaign.num_inputs > 10
    assert campaign.findings == {}


@pytest.mark.suite("fuzz")
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_short_campaign_has_no_findings(name: str) -> None:
    """Runs in a process of its own with limited memory."""
    command = [sys.executable, "-m", "tests.fuzz", name, "--minutes", str(SECONDS / 60)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300 + SECONDS)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


class Fragile:
    """A target that fails for some inputs."""

    name = "fragile"

    def seeds(self) -> list[bytes]:
        return [b"good"]

    def inputs(self, known):
        from hypothesis import strategies as st

        return st.binary(max_size=20)

    def run(self, data: bytes) -> str:
        if len(data) > 3:
            raise ZeroDivisionError(data)
        if len(data) == 3:
            raise KeyError(data)
        return f"{len(data)} bytes"

    def close(self) -> None:
        """No resources to close."""


def test_a_campaign_reports_every_place_once_with_its_smallest_input() -> None:
    campaign = Campaign(Fragile())
    campaign.replay()
    assert len(campaign.findings) == 1, "known inputs are replayed"
    campaign.findings.clear()
    smallest = {"ZeroDivisionError": bytes(4), "KeyError": bytes(3)}
    for number in range(4):  # limited by inputs, not seconds, for the same result on any machine
        campaign.run_batch(number)
    found = {place.split()[0]: data for place, (data, _) in campaign.findings.items()}
    assert found == smallest
