"""The figures of the load test equal the daemon's, with a worker that computes nothing."""

import json
from pathlib import Path

import pytest

from deploy import cli
from deploy.bench.servers import MeasuredDaemon
from tests.benchmarks.null_daemon import NULL_DAEMON

pytestmark = pytest.mark.suite("daemons")

LOADS = [
    ["--concurrency", "1,4", "--max-requests", "12", "--range-ratio", "0.5"],
    ["--request-rate", "40", "--max-requests", "20", "--prompts", "text"],
    ["--dataset", "shared-prefix", "--concurrency", "3", "--duration", "0.5"],
    ["--dataset", "agent", "--system-tokens", "64", "--tools", "2", "--concurrency", "3"],
    ["--dataset", "multi-turn", "--turns", "3", "--endpoint", "completions"],
]


def test_tokens_and_requests_equal_the_daemons_metrics(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    with MeasuredDaemon([], NULL_DAEMON) as daemon:
        sizes = ["--input-tokens", "24", "--output-tokens", "8", "--warm-ups", "0"]
        for words in LOADS:
            before = [daemon.metric(name) for name in names]
            command = ["bench", "serve", "--url", daemon.url, *sizes, *words]
            assert cli.main([*command, "--json", str(file)]) == 0
            after = [daemon.metric(name) for name in names]
            runs = json.loads(file.read_text())["runs"]
            assert [each["num_failed"] + each["num_other_length"] for each in runs] == [0] * len(
                runs
            )
            counted = [
                sum(each[name] for each in runs) for name in ("input_tokens", "output_tokens")
            ]
            assert counted == [now - then for now, then in zip(after, before, strict=True)]
            assert counted[0] > 0
