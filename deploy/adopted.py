"""Reaps processes that became our children without our having started them.

The kernel gives orphans to process 1, which in a container is the supervisor. Their
exit statuses interest nobody, but each unread one keeps an entry in the process table.
"""

import contextlib
import os
from collections.abc import Container


def reap_adopted(ours: Container[int]) -> None:
    """Read the exit statuses of ended children that are not `ours` (process ids).

    Those of `ours` are left to whoever started them. The kernel shows one ended child
    at a time, in its own order, so one of ours hides others until its status has been read.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in ours:
                return
            os.waitpid(ended.si_pid, 0)
