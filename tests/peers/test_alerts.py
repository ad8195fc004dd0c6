"""The alerts for Prometheus, checked and run by Prometheus' own promtool."""

import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.peers.packages import unpack_debian

pytestmark = pytest.mark.suite("peers")

ALERTS: Final = Path(__file__).parents[2] / "deploy" / "docker" / "alerts.yml"
PACKAGE: Final = "prometheus=2.42.0+ds-5+deb12u1"
SHA256: Final = "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"
"""Of Debian's package for x86-64."""


@pytest.fixture(scope="module")
def promtool() -> Path:
    """Debian's promtool."""
    return unpack_debian(PACKAGE, SHA256) / "usr" / "bin" / "promtool"


def run(promtool: Path, *words: str) -> None:
    found = subprocess.run([promtool, *words], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


ENGINE: Final = 'instance="t:8000",job="tokend",model_name="m",engine="0"'
HTTP: Final = 'instance="t:8000",job="tokend",handler="/v1/completions",method="POST"'
LINES: Final[dict[str, dict[str, str]]] = {
    "TokendDown": {'up{instance="t:8000",job="tokend"}': "1 0x20"},
    "TokendNotReady": {f"tokend:ready{{{ENGINE}}}": "1 0x20"},
    "TokendEngineMissing": {f"tokend:engine_ready{{{ENGINE}}}": "1 0x20"},
    "TokendQueueNearlyFull": {
        f"tokend:queued_reqs{{{ENGINE}}}": "60x20",
        f"tokend:max_num_queued_reqs{{{ENGINE}}}": "64x20",
    },
    "TokendRefusesRequests": {
        f'vllm:admission_rejections_total{{{ENGINE},reason="full"}}': "0+3x20"
    },
    "TokendKVFull": {
        f"vllm:kv_cache_usage_perc{{{ENGINE}}}": "1x20",
        f"vllm:num_preemptions_total{{{ENGINE}}}": "0+1x20",
    },
    "TokendRestarts": {f'tokend:restarts_total{{{ENGINE},role="worker"}}': "0 1 2 3 4x20"},
    "TokendHung": {f'tokend:watchdog_kills_total{{{ENGINE},role="worker"}}': "0 0 1x20"},
    "TokendErrors": {
        f'http_requests_total{{{HTTP},status="5xx"}}': "0+1x20",
        f'http_requests_total{{{HTTP},status="2xx"}}': "0+9x20",
    },
}
"""Alert → series, a sample a minute, in which it is alone."""
HEALTHY: Final = {
    'up{instance="t:8000",job="tokend"}': "1x20",
    f"tokend:ready{{{ENGINE}}}": "1 1 0 0 1x20",
    f"tokend:engine_ready{{{ENGINE}}}": "1 1 0 0 1x20",
    f"tokend:queued_reqs{{{ENGINE}}}": "10x20",
    f"tokend:max_num_queued_reqs{{{ENGINE}}}": "64x20",
    f'vllm:admission_rejections_total{{{ENGINE},reason="full"}}': "7x20",
    f"vllm:kv_cache_usage_perc{{{ENGINE}}}": "1x20",
    f"vllm:num_preemptions_total{{{ENGINE}}}": "5x20",
    f'tokend:restarts_total{{{ENGINE},role="worker"}}': "0 1x20",
    f'tokend:watchdog_kills_total{{{ENGINE},role="worker"}}': "1x20",
    f'http_requests_total{{{HTTP},status="5xx"}}': "0+1x20",
    f'http_requests_total{{{HTTP},status="2xx"}}': "0+99x20",
}


def firing(series: dict[str, str]) -> dict[str, Any]:
    """Return a test of promtool that asks which alerts fire in the twelfth minute."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
    }


def test_the_rules_are_valid(promtool: Path) -> None:
    run(promtool, "check", "rules", str(ALERTS))


def test_every_alert_fires_alone_and_none_where_all_is_well(promtool: Path, tmp_path: Path) -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert sorted(names) == sorted(LINES)
    count = 'count by (alertname) (ALERTS{alertstate="firing"})'
    tests = []
    for alert, series in [*LINES.items(), ("", HEALTHY)]:
        labels = f'{{alertname="{alert}"}}'
        expected = [{"labels": labels, "value": 1}] if alert else []
        asked = {"expr": count, "eval_time": "12m", "exp_samples": expected}
        tests.append(firing(series) | {"promql_expr_test": [asked]})
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    run(promtool, "test", "rules", str(path))
