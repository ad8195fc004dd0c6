"""The whole daemon on the GPU under load: 8B over HTTP, requests all at once and as they come."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.e2e.daemon import Daemon
from tests.gpu.checkpoint import write_checkpoint
from tests.gpu.phases import demand
from tests.gpu.random_model import CONFIGS

AT_ONCE = 256
INPUT, OUTPUT = 512, 128
LOAD = 0.7
"""Of what the daemon has done with all requests there at once: how fast they arrive one by one."""
ARRIVING_SECONDS = 15.0
LOAD_SECONDS = 60.0
SHOWN = (
    "output_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
)


def load(url: str, num_requests: int, *how: str, shape: tuple[int, int]) -> dict[str, Any]:
    """What `tokend bench serve` finds; raises Failed where an answer is missing or short.

    how: flags that say when requests are sent. shape: tokens of each prompt and answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        words = ["--url", url, "--json", str(file), "--max-requests", str(num_requests)]
        words += ["--input-tokens", str(shape[0]), "--output-tokens", str(shape[1])]
        words += ["--lowest-token-id", "0", "--highest-token-id", "900", "--warm-ups", "0", *how]
        result = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.cli", "bench", "serve", *words],
            capture_output=True,
            text=True,
            timeout=LOAD_SECONDS,
        )
        demand(result.returncode == 0, f"bench serve ended with {result.stderr[-300:]}")
        (run,) = json.loads(file.read_text())["runs"]
    answered = run["num_completed"] == num_requests and not run["num_other_length"]
    demand(answered, f"of {num_requests} requests not all are answered in full: {run['errors']}")
    found: dict[str, Any] = run
    return found


def shown(run: dict[str, Any]) -> dict[str, float]:
    """What of a run goes into the table."""
    return {name: run[name] for name in SHOWN}


def daemon_8b() -> dict[str, Any]:
    """Tokens a second and latencies, after a warm-up; a Poisson process of arrivals last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, CONFIGS["8B"])
        flags = ("--device", "cuda", "--attention-backend", "flashinfer")
        flags += ("--max-model-len", "2048")
        started = time.monotonic()
        with Daemon(str(folder), *flags) as daemon:
            ready = time.monotonic() - started
            load(daemon.url, 8, "--concurrency", "8", shape=(INPUT, 8))
            shape = (INPUT, OUTPUT)
            at_once = load(daemon.url, AT_ONCE, "--concurrency", str(AT_ONCE), shape=shape)
            rate = LOAD * at_once["requests_per_s"]
            arriving = load(
                daemon.url,
                max(1, round(rate * ARRIVING_SECONDS)),
                "--request-rate",
                f"{rate:.2f}",
                shape=shape,
            )
    return {
        "ready in s": ready,
        "all at once": shown(at_once),
        f"Poisson, {rate:.1f} a second": shown(arriving),
    }
