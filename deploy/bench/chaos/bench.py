"""`tokend bench chaos`: kill and stop processes under load, and look whether anybody notices.

answers undisturbed, twice ─▶ clients ask the same in a closed loop, processes die
                              ─▶ the same once more undisturbed ─▶ nothing may be left over
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

from deploy.bench.chaos import killer
from deploy.bench.chaos.killer import ENGINE, WORKER, Blow, Crowd, Killer, Strike, Tally
from deploy.bench.chaos.streams import (
    MAX_TIE_RATE,
    TIE_GAP,
    BrokenStreamError,
    Difference,
    Stream,
    Verdict,
    bodies,
    compare,
    gap,
    undisturbed,
)
from deploy.bench.options import Parser, at_least_one, positive, writable, write
from deploy.bench.processes import Rest, left_over, pids_by_title
from deploy.bench.servers import MeasuredDaemon
from deploy.bench.verdicts import Limit, judge, limits_json, limits_table, quantile
from proto.errors import TokendError

# What a chaos run found, as tables, as limits and as data.


MAX_GAP_SECONDS: Final = 2.0
"""From an engine's death to the next token; a worker has its start and as much again."""
_BACK: Final = re.compile(r"^(\w+) \d+: is back after ([0-9.]+) s")


@dataclass
class Findings:
    """differences: with the gap between the scores of the two tokens.

    after: what was not as before when it was over. trouble: why the run ended early.
    lines: that the daemon printed.
    """

    tally: Tally
    strikes: Sequence[Strike]
    differences: list[tuple[Difference, float]] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    lines: Sequence[str] = ()

    @property
    def different(self) -> list[tuple[Difference, float]]:
        """Those that are no ties."""
        return [each for each in self.differences if each[1] >= TIE_GAP]

    @property
    def num_ties(self) -> int:
        """Differences between tokens that were as good as each other."""
        return len(self.differences) - len(self.different)

    @property
    def faults(self) -> list[str]:
        """Everything that must not be and can be shown, in words."""
        found = [f"failed: {each}" for each in self.tally.failures]
        found += [f"different: {one.describe()}, gap {gap:.2g}" for one, gap in self.different]
        found += [f"different: {each}" for each in self.tally.verdict.wrong]
        found += [f"afterwards: {each}" for each in self.after]
        return found + self.trouble

    @property
    def limits(self) -> list[Limit]:
        """What the run is judged by; the gaps of those who were there to die."""
        verdict = self.tally.verdict
        most_ties = max(1.0, verdict.num_tokens * MAX_TIE_RATE)
        num_different = len(self.different) + len(verdict.wrong)
        return [
            Limit("failed requests", len(self.tally.failures), "at most", 0),
            Limit("different answers", num_different, "at most", 0),
            Limit("ties", self.num_ties, "at most", most_ties),
            Limit("left over", len(self.after), "at most", 0),
            Limit("ended early", len(self.trouble), "at most", 0),
            *self._gap_limits(),
        ]

    def _gap_limits(self) -> list[Limit]:
        """Medians: one step of other people's prompts may be longer than all of a restart."""
        limits = []
        for title, start in ((ENGINE, 0.0), (WORKER, self._start_of("worker"))):
            gaps = [each.gap for each in self.strikes if _is_plain_death(each, title)]
            if gaps:
                name = f"{title.removeprefix('tokend: ')}: median gap"
                bound = start + MAX_GAP_SECONDS
                limits.append(Limit(name, statistics.median(gaps), "at most", bound, "s"))
        return limits

    def _start_of(self, role: str) -> float:
        seconds = self.starts.get(role)
        return statistics.median(seconds) if seconds else 0.0

    @property
    def starts(self) -> dict[str, list[float]]:
        """Seconds from a death until the next life is at work, by role, as the daemon says."""
        found = defaultdict(list)
        for line in self.lines:
            if back := _BACK.match(line):
                found[back[1]].append(float(back[2]))
        return found

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kills": [
                {"blow": each.blow.name, "gap": each.gap, "gaps": list(each.gaps)}
                for each in self.strikes
            ],
            "starts": self.starts,
            "requests": self.tally.num_requests,
            "left": self.tally.num_left,
            "excused": self.tally.num_excused,
            "tokens": self.tally.verdict.num_tokens,
            "faults": self.faults,
        }


def _is_plain_death(strike: Strike, title: str) -> bool:
    """Of this process alone, and at once: who is stopped is first missed."""
    return strike.blow.titles == (title,) and strike.blow.signal is not signal.SIGSTOP


def show(console: Console, findings: Findings) -> None:
    """Print everything."""
    tally, verdict = findings.tally, findings.tally.verdict
    console.print(_strikes(findings.strikes))
    for role, seconds in findings.starts.items():
        console.print(
            f"{role}: at work {statistics.median(seconds):.1f} s after its death, "
            f"at most {max(seconds):.1f} s"
        )
    console.print(f"kills        {len(findings.strikes):>8,}")
    console.print(f"requests     {tally.num_requests:>8,}   {tally.num_left:,} clients went away")
    if tally.num_excused:
        console.print(f"ended with their front end {tally.num_excused:,}")
    console.print(f"failed       {len(tally.failures):>8,}")
    console.print(f"tokens       {verdict.num_tokens:>8,}   compared")
    console.print(f"different    {len(findings.different) + len(verdict.wrong):>8,}")
    for difference, logit_gap in findings.differences:
        if logit_gap < TIE_GAP:
            console.print(f"a tie: {difference.describe()}, gap {logit_gap:.2g}", markup=False)
    for fault in findings.faults:
        console.print(fault, markup=False)
    console.print(limits_table(findings.limits))


def _strikes(strikes: Sequence[Strike]) -> Table:
    """Only whoever was hit was started again: a strike that did more is none."""
    table = Table(title="seconds to the next token: first stream, all")
    for name in ("kind", "kills", "p50", "p99", "all p50", "all p99"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    counts = Counter(each.blow.name for each in strikes)
    for kind, number in sorted(counts.items()):
        of_kind = [each for each in strikes if each.blow.name == kind]
        firsts = [each.gap for each in of_kind]
        everyone = [gap for each in of_kind for gap in each.gaps]
        cells = [quantile(which, part) for which in (firsts, everyone) for part in (0.5, 0.99)]
        table.add_row(kind, str(number), *[f"{cell:.2f}" for cell in cells])
    return table


_FLAGS: Final = (
    *("--dtype", "float32", "--async-scheduling", "--scheduling-policy", "priority"),
    *("--max-num-seqs", "16", "--num-gpu-blocks-override", "192", "--step-timeout", "5"),
)
"""Small enough that requests wait for a seat and are preempted for a block; and no step of this
load takes 5 s where nothing is stopped."""
_CLIENTS: Final = 18
_KILLS_A_MINUTE: Final = 6
_REQUEST_SECONDS: Final = 300


def main(words: Sequence[str]) -> None:
    """Run and print; raises TokendError naming each limit that was missed."""
    options = _parse(words)
    with writable("--json", options.json) as files:
        with MeasuredDaemon([*_FLAGS, *options.serve_flags]) as daemon:
            findings = asyncio.run(_run(daemon, options))
            findings.lines = list(daemon.lines)
        show(Console(width=110), findings)
        write(files, limits_json(findings.limits, findings.plain()))
    judge("bench chaos", findings.limits)


async def _run(daemon: MeasuredDaemon, options: argparse.Namespace) -> Findings:
    asked = bodies(options.tokens)
    expected = await undisturbed(daemon.url, asked)
    verdict = _compare(expected, await undisturbed(daemon.url, asked))
    before = await asyncio.to_thread(Rest.of, daemon)
    findings = await _disturb(daemon, options, expected)
    try:
        verdict.add(_compare(expected, await undisturbed(daemon.url, asked)))
        findings.tally.verdict.add(verdict)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=_REQUEST_SECONDS) as client:
            for difference in findings.tally.verdict.differences:
                findings.differences.append((difference, await gap(client, difference)))
        findings.after = await asyncio.to_thread(left_over, before, daemon)
    except (BrokenStreamError, httpx.HTTPError) as error:
        findings.trouble.append(f"afterwards: {error!r}")
    return findings


async def _disturb(
    daemon: MeasuredDaemon, options: argparse.Namespace, expected: list[Stream]
) -> Findings:
    rng = random.Random(options.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=daemon.url, timeout=_REQUEST_SECONDS, limits=limits
    ) as client:
        crowd = Crowd(client, expected, _CLIENTS, rng)
        hand = Killer(lambda: pids_by_title(daemon.pid), crowd, rng, _blows(options))
        findings = Findings(crowd.tally, hand.strikes)
        try:
            await _strike_all(hand, options)
        except TokendError as error:
            findings.trouble.append(str(error))
        await crowd.leave()
    return findings


async def _strike_all(hand: Killer, options: argparse.Namespace) -> None:
    """The kills spread over the time; longer where the daemon takes longer to go on."""
    number = options.kills or max(1, round(options.minutes * _KILLS_A_MINUTE))
    begin, pace = time.monotonic(), options.minutes * 60 / number
    for each in range(1, number + 1):
        strike = await hand.strike()
        print(
            f"{each}/{number} {strike.blow.name}: {strike.gap:.2f} s, "
            f"all {len(strike.gaps)} streams {max(strike.gaps):.2f} s",
            file=sys.stderr,
            flush=True,
        )
        await asyncio.sleep(max(0.0, begin + each * pace - time.monotonic()))


def _compare(expected: Sequence[Stream], got: Sequence[Stream]) -> Verdict:
    verdict = Verdict()
    for one, other in zip(expected, got, strict=True):
        verdict.add(compare(one, other))
    return verdict


def _blows(options: argparse.Namespace) -> tuple[Blow, ...]:
    if options.front_ends:
        return killer.FRONT_END_BLOWS
    return killer.BLOWS + killer.STOPS


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="tokend bench chaos", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=10.0, help="of disturbance (10)")
    parser.add_argument(
        "--kills", type=at_least_one, help=f"in that time; by default {_KILLS_A_MINUTE} a minute"
    )
    parser.add_argument("--tokens", type=at_least_one, default=48, help="of each answer (48)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of things (0)")
    parser.add_argument(
        "--front-ends", action="store_true", help="kill front ends, whose streams end with them"
    )
    parser.add_argument("--json", metavar="FILE", help="file to write the figures to")
    parser.add_argument("serve_flags", nargs="*", help="after --: more flags of tokend serve")
    return parser.parse_args(words)
