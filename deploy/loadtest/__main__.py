"""`python -m deploy.loadtest [flags of tokend serve]`: start, measure, print a table."""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence

from deploy.loadtest.client import complete_together
from deploy.loadtest.daemon import MeasuredDaemon, cpu_seconds, resident_bytes

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
TOGETHER = 16
REPEATS = 5
LOWEST_ID, HIGHEST_ID = 100, 1000
"""Token ids that every vocabulary has, and that are seldom special."""


def main(flags: Sequence[str]) -> None:
    """Print a Markdown table of figures."""
    daemon = MeasuredDaemon(flags)
    try:
        rows = [("start to ready", f"{daemon.seconds_to_ready:.1f} s")]
        rows += measure_alone(daemon)
        rows += measure_together(daemon)
        rows += [
            (f"resident memory, {name}", f"{resident_bytes(pid) / 1e6:.0f} MB")
            for name, pid in daemon.processes().items()
        ]
    finally:
        daemon.stop()
    print(f"{PROMPT_TOKENS} tokens of random prompt, {OUTPUT_TOKENS} of output, greedy\n")
    print("| figure | value |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


def measure_alone(daemon: MeasuredDaemon) -> list[tuple[str, str]]:
    """Medians over requests, one at a time, the first left out."""
    timings = [
        asyncio.run(complete_together(daemon.url, [prompt], OUTPUT_TOKENS))[0]
        for prompt in prompts(REPEATS + 1, seed=1)
    ][1:]
    first = statistics.median(timing.first for timing in timings)
    per_token = statistics.median(timing.per_token for timing in timings)
    return [
        ("alone: time to first token", f"{first * 1e3:.0f} ms"),
        ("alone: time per token", f"{per_token * 1e3:.1f} ms"),
    ]


def measure_together(daemon: MeasuredDaemon) -> list[tuple[str, str]]:
    """Throughput of many at once, and what engine and front end spend on it."""
    watched = {name: pid for name, pid in daemon.processes().items() if name != "supervisor"}
    before = {name: cpu_seconds(pid) for name, pid in watched.items()}
    started = time.perf_counter()
    timings = asyncio.run(complete_together(daemon.url, prompts(TOGETHER, seed=2), OUTPUT_TOKENS))
    seconds = time.perf_counter() - started
    first = statistics.median(timing.first for timing in timings)
    rows = [
        (f"{TOGETHER} at once: output tokens/s", f"{TOGETHER * OUTPUT_TOKENS / seconds:.0f}"),
        (f"{TOGETHER} at once: median time to first token", f"{first * 1e3:.0f} ms"),
    ]
    for name, pid in watched.items():
        # a step makes one token of each request, after a few that read the prompts
        per_step = (cpu_seconds(pid) - before[name]) / OUTPUT_TOKENS
        rows.append((f"{TOGETHER} at once: CPU a step, {name}", f"{per_step * 1e3:.2f} ms"))
    return rows


def prompts(number: int, seed: int) -> list[list[int]]:
    """Prompts that share no prefix."""
    draw = random.Random(seed)
    return [
        [draw.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(PROMPT_TOKENS)] for _ in range(number)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
