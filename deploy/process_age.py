"""How long ago this process was started, Python's own start included: the kernel knows."""

import os
import time
from pathlib import Path
from typing import Final

_START_TIME: Final = 19
"""Place of the field behind the name of the process; see proc(5)."""


def process_age() -> float:
    """Seconds, in steps of a hundredth; 0 where the kernel does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
