"""The systemd unit, checked by systemd's tools and against the daemon."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.supervisor.shutdown import ON_REQUEST
from proto.settings.config import ReliabilityConfig

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "tokend.service"
MOST_EXPOSED = 2.0
"""Highest exposure level of `systemd-analyze security`; without hardening it is 9.6."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def settings() -> dict[str, str]:
    lines = UNIT.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]\w*=", line))


@needs_systemd
def test_systemd_analyze_accepts_the_unit(tmp_path: Path) -> None:
    """Only the path of the command is replaced by one that exists here."""
    unit = tmp_path / "tokend.service"
    unit.write_text(UNIT.read_text().replace("/opt/tokend/bin/tokend", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_the_security_exposure_is_low() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
    )
    found = re.search(r"Overall exposure level for tokend.service: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= MOST_EXPOSED


def test_the_unit_matches_the_daemons_notifications() -> None:
    """Heartbeats at half of WatchdogSec, from the supervisor only; status 2 is a usage error."""
    unit = settings()
    assert unit["Type"] == "notify"
    assert unit["NotifyAccess"] == "main"
    assert unit["KillMode"] == "mixed"
    assert unit["RestartPreventExitStatus"] == "2"
    assert unit["WatchdogSec"] == "30s"
    assert unit["ExecReload"] == "/opt/tokend/bin/tokend reload --pid $MAINPID"
    longest = ReliabilityConfig().shutdown_timeout + ON_REQUEST.until_kill
    assert int(unit["TimeoutStopSec"].removesuffix("s")) > longest
