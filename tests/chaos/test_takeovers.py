"""Engine and worker of a daemon with standby processes are killed under streams."""

import asyncio

import httpx
import pytest

from tests.chaos.aftermath import ENGINE, WORKER, assert_unharmed
from tests.chaos.streams import assert_same, requests, run_undisturbed
from tests.chaos.test_deaths import SEATS, run_with_deaths
from tests.e2e.daemon import ROLES, Daemon, eventually

pytestmark = pytest.mark.suite("chaos")


def are_ready(daemon: Daemon) -> bool:
    standby = httpx.get(f"{daemon.url}/health/ready").json()["standby"]
    return bool(standby == {"engine": 1, "worker": 1})


def test_streams_survive_deaths_beside_standby_processes() -> None:
    """Tokens are those of an undisturbed run; each victim's place has the standby process."""
    flags = ("--standby-engines", "1", "--standby-workers", "1")
    with Daemon("--cpu-weights", "packed", "--max-num-seqs", str(SEATS), *flags) as daemon:
        expected = asyncio.run(run_undisturbed(daemon.url, requests()))
        for roles in ({"engine_core"}, {"worker"}, {"worker", "engine_core"}):
            # Those that replace the last victims wait until the streams have caught up
            assert eventually(lambda: are_ready(daemon), 60.0)
            assert daemon.metric("tokend:standby_processes") == 2
            text = daemon.text
            titles = {ENGINE if role == "engine_core" else WORKER for role in roles}
            standby = {f"tokend: standby {ROLES[role]} 0" for role in roles}
            with assert_unharmed(daemon, titles | standby):
                victims = daemon.processes()
                streams, gap = asyncio.run(run_with_deaths(daemon, [victims[r] for r in roles]))
                assert eventually(lambda: are_ready(daemon), 60.0)
            for was, now in zip([*expected, expected[0]], streams, strict=True):
                assert_same(was, now)
            print(f"{roles}: {gap:.2f} s from death to the next token")
            added = daemon.text.removeprefix(text)
            assert added.count("was on standby and takes the place") == len(roles)
        assert "Traceback" not in daemon.text
        pids = daemon.process_ids()
    assert "nothing is left running" in daemon.text
    assert len(pids) == 5
