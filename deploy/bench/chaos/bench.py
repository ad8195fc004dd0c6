"""`tokend bench chaos`: kills and stops processes under load, and checks every answer.

reference answers, twice ─▶ clients send the same requests in a closed loop, processes are killed
                            ─▶ the requests once more ─▶ no process or descriptor may be left over
"""

import argparse
import asyncio
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.chaos.killer import (
    ENGINE,
    FRONT_END_KILLS,
    KILLS,
    STOPS,
    WORKER,
    ClientCounts,
    ClientPool,
    DisruptionResult,
    ProcessKiller,
)
from deploy.bench.chaos.streams import (
    MAX_TIE_RATE,
    TIE_GAP,
    CompletionStream,
    InvalidStreamError,
    StreamComparison,
    TokenDifference,
    compare_streams,
    reference_answers,
    request_bodies,
    score_gap,
)
from deploy.bench.limits import Limit, check_limits, limits_json, limits_table, quantile
from deploy.bench.options import BenchParser, at_least_one, positive, writable, write
from deploy.bench.processes import IdleState, find_leftovers, pids_by_title
from deploy.bench.servers import MeasuredDaemon
from proto.errors import TokendError

# ---- Findings ----


MAX_GAP_SECONDS: Final = 2.0
"""Target for the time from an engine's death to the next token; a worker's may add its start."""
_LEAST_GAPS: Final = 3
"""Gaps whose median has a limit. Fewer are shown only: one may be another program's doing."""
_BACK: Final = re.compile(r"\b(\w+) \d+ is back after ([0-9.]+) s")


@dataclass
class ChaosFindings:
    """Results of a chaos run.

    differences: different tokens, each with the gap between the scores of the two tokens.
    leftovers: resources that have grown. aborted: why the run ended early.
    lines: output of the daemon.
    """

    counts: ClientCounts
    disruptions: Sequence[DisruptionResult]
    differences: list[tuple[TokenDifference, float]] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    lines: Sequence[str] = ()

    @property
    def different(self) -> list[tuple[TokenDifference, float]]:
        """Differences that are not ties."""
        return [entry for entry in self.differences if entry[1] >= TIE_GAP]

    @property
    def faults(self) -> list[str]:
        """Return descriptions of all faults."""
        found = [f"failed: {failure}" for failure in self.counts.failures]
        found += [f"different: {one.describe()}, gap {gap:.2g}" for one, gap in self.different]
        found += [f"different: {error}" for error in self.counts.comparison.other_errors]
        found += [f"left over: {leftover}" for leftover in self.leftovers]
        return found + self.aborted

    @property
    def limits(self) -> list[Limit]:
        """Return all limits, with the measured values.

        Those of gaps are of medians: a single long prefill step may exceed a whole restart.
        """
        comparison, different = self.counts.comparison, self.different
        most_ties = max(1.0, comparison.num_tokens * MAX_TIE_RATE)
        num_different = len(different) + len(comparison.other_errors)
        found = [
            Limit("failed requests", len(self.counts.failures), "at most", 0),
            Limit("different answers", num_different, "at most", 0),
            Limit("ties", len(self.differences) - len(different), "at most", most_ties),
            Limit("left over", len(self.leftovers), "at most", 0),
            Limit("ended early", len(self.aborted), "at most", 0),
        ]
        worker_start = statistics.median(self.starts.get("worker", [0.0]))
        for title, start in ((ENGINE, 0.0), (WORKER, worker_start)):
            gaps = [
                result.gap
                for result in self.disruptions
                if result.disruption.titles == (title,)
                and result.disruption.signal is not signal.SIGSTOP
            ]
            if len(gaps) >= _LEAST_GAPS:
                name = f"{title.removeprefix('tokend: ')}: median gap"
                bound = start + MAX_GAP_SECONDS
                found.append(Limit(name, statistics.median(gaps), "at most", bound, "s"))
        return found

    @property
    def starts(self) -> dict[str, list[float]]:
        """Seconds from a death until the successor is ready, by role, as printed by the daemon."""
        found = defaultdict(list)
        for line in self.lines:
            if back := _BACK.search(line):
                found[back[1]].append(float(back[2]))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "kills": [
                {"kind": result.disruption.name, "gap": result.gap, "gaps": list(result.gaps)}
                for result in self.disruptions
            ],
            "starts": self.starts,
            "requests": self.counts.num_requests,
            "disconnected": self.counts.num_disconnected,
            "excused": self.counts.num_excused,
            "tokens": self.counts.comparison.num_tokens,
            "faults": self.faults,
        }


def show(console: Console, findings: ChaosFindings) -> None:
    counts, comparison = findings.counts, findings.counts.comparison
    console.print(_gap_table(findings.disruptions))
    for role, seconds in findings.starts.items():
        console.print(
            f"{role}: ready {statistics.median(seconds):.1f} s after its death, "
            f"at most {max(seconds):.1f} s"
        )
    console.print(f"kills        {len(findings.disruptions):>8,}")
    console.print(
        f"requests     {counts.num_requests:>8,}   {counts.num_disconnected:,} clients disconnected"
    )
    if counts.num_excused:
        console.print(f"failed with their front end {counts.num_excused:,}")
    console.print(f"failed       {len(counts.failures):>8,}")
    console.print(f"tokens       {comparison.num_tokens:>8,}   compared")
    console.print(f"different    {len(findings.different) + len(comparison.other_errors):>8,}")
    for difference, logit_gap in findings.differences:
        if logit_gap < TIE_GAP:
            console.print(f"tie: {difference.describe()}, gap {logit_gap:.2g}", markup=False)
    for fault in findings.faults:
        console.print(fault, markup=False)
    console.print(limits_table(findings.limits))


def _gap_table(disruptions: Sequence[DisruptionResult]) -> Table:
    table = Table(title="seconds to the next token: first stream, all")
    for name in ("kind", "kills", "p50", "p99", "all p50", "all p99"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    counts = Counter(result.disruption.name for result in disruptions)
    for kind, number in sorted(counts.items()):
        of_kind = [result for result in disruptions if result.disruption.name == kind]
        firsts = [result.gap for result in of_kind]
        all_gaps = [gap for result in of_kind for gap in result.gaps]
        cells = [quantile(which, part) for which in (firsts, all_gaps) for part in (0.5, 0.99)]
        table.add_row(kind, str(number), *[f"{cell:.2f}" for cell in cells])
    return table


_FLAGS: Final = (
    *("--dtype", "float32", "--async-scheduling", "--scheduling-policy", "priority"),
    *("--max-num-seqs", "16", "--num-gpu-blocks-override", "192", "--step-timeout", "5"),
)
"""Flags of the daemon: so few sequences and blocks that requests wait and are preempted."""
_CLIENTS: Final = 18
_KILLS_PER_MINUTE: Final = 6
_REQUEST_SECONDS: Final = 300


def main(words: Sequence[str]) -> None:
    options = _parse(words)
    with writable("--json", options.json) as files:
        with MeasuredDaemon([*_FLAGS, *options.serve_flags]) as daemon:
            findings = asyncio.run(_run(daemon, options))
            findings.lines = [line.text for line in daemon.lines]
        show(Console(width=110), findings)
        write(files, limits_json(findings.limits, findings.to_dict()))
    check_limits("bench chaos", findings.limits)


async def _run(daemon: MeasuredDaemon, options: argparse.Namespace) -> ChaosFindings:
    bodies = request_bodies(options.tokens)
    expected = await reference_answers(daemon.url, bodies)
    comparison = _compare(expected, await reference_answers(daemon.url, bodies))
    before = await asyncio.to_thread(IdleState.settled, daemon)
    findings = await _disturb(daemon, options, expected)
    try:
        comparison.merge(_compare(expected, await reference_answers(daemon.url, bodies)))
        findings.counts.comparison.merge(comparison)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=_REQUEST_SECONDS) as client:
            for difference in findings.counts.comparison.differences:
                findings.differences.append((difference, await score_gap(client, difference)))
        findings.leftovers = await asyncio.to_thread(find_leftovers, before, daemon)
    except (InvalidStreamError, httpx.HTTPError) as error:
        findings.aborted.append(f"afterwards: {error!r}")
    return findings


async def _disturb(
    daemon: MeasuredDaemon, options: argparse.Namespace, expected: list[CompletionStream]
) -> ChaosFindings:
    rng = random.Random(options.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=daemon.url, timeout=_REQUEST_SECONDS, limits=limits
    ) as client:
        clients = ClientPool(client, expected, _CLIENTS, rng)
        disruptions = FRONT_END_KILLS if options.front_ends else KILLS + STOPS
        killer = ProcessKiller(lambda: pids_by_title(daemon.pid), clients, rng, disruptions)
        findings = ChaosFindings(clients.counts, killer.results)
        try:
            await _disrupt_all(killer, options)
        except TokendError as error:
            findings.aborted.append(str(error))
        await clients.stop()
    return findings


async def _disrupt_all(killer: ProcessKiller, options: argparse.Namespace) -> None:
    """Distribute the kills over the time; it takes longer if the daemon recovers slowly."""
    number = options.kills or max(1, round(options.minutes * _KILLS_PER_MINUTE))
    begin, interval = time.monotonic(), options.minutes * 60 / number
    for index in range(1, number + 1):
        result = await killer.disrupt()
        print(
            f"{index}/{number} {result.disruption.name}: {result.gap:.2f} s, "
            f"all {len(result.gaps)} streams {max(result.gaps):.2f} s",
            file=sys.stderr,
            flush=True,
        )
        await asyncio.sleep(max(0.0, begin + index * interval - time.monotonic()))


def _compare(
    expected: Sequence[CompletionStream], got: Sequence[CompletionStream]
) -> StreamComparison:
    comparison = StreamComparison()
    for one, other in zip(expected, got, strict=True):
        comparison.merge(compare_streams(one, other))
    return comparison


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="tokend bench chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=positive, default=10.0, help="duration of the disruptions (10)"
    )
    parser.add_argument(
        "--kills",
        type=at_least_one,
        help=f"number of kills; by default {_KILLS_PER_MINUTE} per minute",
    )
    parser.add_argument("--tokens", type=at_least_one, default=48, help="tokens per answer (48)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order of requests and kills (0)"
    )
    parser.add_argument(
        "--front-ends", action="store_true", help="kill front ends, whose streams end with them"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("serve_flags", nargs="*", help="after --: more flags of tokend serve")
    return parser.parse_args(words)
