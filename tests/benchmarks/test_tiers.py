"""`python -m tests.benchmarks.tiers` with real daemons: KV is reused after a restart."""

import json
from pathlib import Path

import pytest

from proto.errors import TokendError
from tests.benchmarks import tiers as tiers_bench
from tests.benchmarks.command import run


@pytest.mark.suite("media")
def test_a_restart_finds_the_prompts_on_a_disk(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = ["--media", "disk", "--disk-path", str(tmp_path), "--rounds", "1"]
    words += ["--lengths", "64,512", "--json", str(figures), "--", "--cpu-weights", "bf16"]
    assert run(tiers_bench.main, words) == 0
    document = json.loads(figures.read_text())
    assert [(each["medium"], each["num_tokens"]) for each in document["rows"]] == [
        ("disk", 64),
        ("disk", 512),
    ]
    for row in document["rows"]:
        assert row["computed_ms"] > 0 < row["found_ms"]
        assert row["ratio"] == pytest.approx(row["found_ms"] / row["computed_ms"])
    assert list(tmp_path.iterdir()) == [figures], (
        "the KV folder was not removed after the measurement"
    )


def test_a_store_needs_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_bench.shutil, "which", lambda name: None)
    with pytest.raises(TokendError, match="redis-server is not installed: give --redis-url"):
        tiers_bench._Redis(tmp_path)
