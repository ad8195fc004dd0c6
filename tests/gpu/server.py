"""The whole daemon on the GPU under load: 8B over HTTP, with a burst and with random arrivals."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.daemon import Daemon
from tests.gpu.checkpoint import write_checkpoint
from tests.gpu.hardware import Hardware, hardware
from tests.gpu.report import Failed, Report, demand

LOAD = 0.7
"""Of what the daemon has done with all requests there at once: how fast they arrive one by one."""
LOAD_SECONDS = 60.0
SHOWN = (
    "output_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
)


def load(url: str, num_requests: int, *how: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Run `tokend bench serve`; returns its result, raises Failed if it fails.

    how: flags of the arrival process. shape: tokens of prompts and outputs.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        words = ["--url", url, "--json", str(file), "--max-requests", str(num_requests)]
        words += ["--input-tokens", str(shape[0]), "--output-tokens", str(shape[1])]
        words += ["--lowest-token-id", "0", "--highest-token-id", "90", "--warm-ups", "0", *how]
        try:
            result = subprocess.run(
                [sys.executable, "-P", "-m", "deploy.cli", "bench", "serve", *words],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                timeout=LOAD_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"bench serve took over {LOAD_SECONDS:.0f} s") from None
        demand(result.returncode == 0, f"bench serve ended with {result.stderr[-300:]}")
        (run,) = json.loads(file.read_text())["runs"]
    found: dict[str, Any] = run
    return found


def demand_answers(run: dict[str, Any], num_requests: int) -> None:
    """Raise Failed if an output is missing or short."""
    answered = run["num_completed"] == num_requests and not run["num_other_length"]
    demand(answered, f"of {num_requests} requests not all are answered in full: {run['errors']}")


def shown(run: dict[str, Any]) -> dict[str, float]:
    """The figures of a run for the table."""
    return {name: run[name] for name in SHOWN}


@contextmanager
def checkpoint(gpu: Hardware, name: str) -> Iterator[str]:
    """A model folder with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), gpu.sizes.configs[name])
        yield folder


def daemon_8b(report: Report) -> None:
    """Throughput and latencies after a warm-up: bursts, then Poisson arrivals."""
    gpu = hardware()
    shape, at_once = (gpu.sizes.input, gpu.sizes.output), gpu.sizes.at_once
    started = time.monotonic()
    with checkpoint(gpu, "8B") as folder:
        report.figure("checkpoint written in s", time.monotonic() - started)
        started = time.monotonic()
        with Daemon(folder, *gpu.daemon_flags) as daemon:
            report.figure("ready in s", time.monotonic() - started)
            load(daemon.url, 8, "--concurrency", "8", shape=(gpu.sizes.input, 8))
            run = load(daemon.url, at_once, "--concurrency", str(at_once), shape=shape)
            report.figure(f"{at_once} at once", shown(run))
            demand_answers(run, at_once)
            rate = LOAD * run["requests_per_s"]
            count = max(1, round(rate * gpu.sizes.arriving_seconds))
            run = load(daemon.url, count, "--request-rate", f"{rate:.2f}", shape=shape)
            report.figure(f"Poisson, {rate:.1f} a second", shown(run))
            demand_answers(run, count)
