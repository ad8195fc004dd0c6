"""`tokend bench chaos`: kill and stop processes under load, and look whether anybody notices.

answers undisturbed, twice ─▶ clients ask the same in a closed loop, processes die
                              ─▶ the same once more undisturbed ─▶ nothing may be left over
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from typing import Final

import httpx
from rich.console import Console

from deploy.loadtest.chaos import killer
from deploy.loadtest.chaos.crowd import Crowd
from deploy.loadtest.chaos.killer import Blow, Killer
from deploy.loadtest.chaos.mix import bodies
from deploy.loadtest.chaos.oracle import Verdict, compare, gap, undisturbed
from deploy.loadtest.chaos.report import Findings, show
from deploy.loadtest.chaos.stream import BrokenStreamError, Stream
from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.limits import judge, limits_json
from deploy.loadtest.options import Parser, at_least_one, positive, writable, write
from deploy.loadtest.processes import pids_by_title
from deploy.loadtest.rest import Rest, left_over
from proto.errors import TokendError

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
