"""A group of ranks over torch.distributed: gloo between CPUs, NCCL between GPUs.

Owns the process group of one epoch. The ranks find each other by a file in the daemon's private
directory. Gloo's own connections, and those by which NCCL meets, are TCP on the loopback
interface (docs/security.md).

    gloo   a call is waited for on the host, without a limit
    NCCL   a call is queued, and what is queued behind it waits for it on the device; the host
           goes on, hears of the others' end from the supervisor, and `leave` frees the device
"""

import contextlib
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from worker.parallel.group import LONG_WAIT_SECONDS, GroupLostError

_WITHOUT_LIMIT: Final = timedelta(days=30)
"""Of a call. A daemon may be stopped as a whole and go on: only the supervisor says who hangs."""
_LONG_WAIT: Final = timedelta(seconds=LONG_WAIT_SECONDS)
_POLL_SECONDS: Final = 0.005
_LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_INTERFACE: Final = "lo"


def rendezvous_path(run_dir: str, epoch: int, purpose: str = "steps") -> str:
    """The file by which the ranks of an epoch find each other; never the same twice."""
    return os.path.join(run_dir, f"e{epoch}.{purpose}.ranks")


class TorchGroup:
    """A RankGroup.

    run_dir: the daemon's private directory. on_long_wait: is called when the others let a call
    wait for LONG_WAIT_SECONDS, once a call. called_away: whether waiting for them to meet is
    over, because something else is wanted of this rank.
    """

    def __init__(
        self,
        run_dir: str,
        rank: int,
        size: int,
        device: torch.device,
        on_long_wait: Callable[[], None],
        called_away: Callable[[], bool],
    ) -> None:
        self.rank = rank
        self.size = size
        self._run_dir = run_dir
        self._device = device
        self._on_long_wait = on_long_wait
        self._called_away = called_away
        self._joined: list[Any] = []

    def join(self, epoch: int, purpose: str = "steps") -> None:
        """As the Protocol says; each time it is a process group of its own."""
        self.leave()
        try:
            path = rendezvous_path(self._run_dir, epoch, purpose)
            store = FileStore(path, self.size)
            self._await_all(store)
            self._joined = [self._process_group(store)]
        except RuntimeError as error:
            raise self._lost(error) from error
        self.gather(torch.zeros(1, device=self._device))  # nobody needs the file from here on
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def leave(self) -> None:
        for group in self._joined:
            group.abort()
        self._joined = []

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty((self.size, *x.shape))
        # gloo wants the parts one below the other
        flat = parts.view(self.size * x.shape[0], *x.shape[1:])
        if not self._joined:
            raise GroupLostError(f"worker {self.rank} has left the others")
        (group,) = self._joined
        try:
            self._await(group._allgather_base(flat, x.contiguous()))
        except RuntimeError as error:
            raise self._lost(error) from error
        return parts

    def _await(self, work: Any) -> None:
        """Until a call has ended; raises RuntimeError where it failed.

        NCCL's goes on in its place in the device's queue; with a limit it would be waited for on
        the host, which a graph that is being recorded cannot be.
        """
        if self._device.type == "cuda":
            work.wait()
            return
        try:
            work.wait(_LONG_WAIT)
        except RuntimeError:
            if work.is_completed():
                raise
            self._on_long_wait()
            work.wait(_WITHOUT_LIMIT)

    def _await_all(self, store: FileStore) -> None:
        """Until every rank is here: what comes then has no limit worth the name."""
        store.add("here", 1)
        while (here := store.add("here", 0)) < self.size:
            if self._called_away():
                raise GroupLostError(
                    f"worker {self.rank}: {here} of {self.size} workers have met when it was over"
                )
            time.sleep(_POLL_SECONDS)

    def _process_group(self, store: FileStore) -> Any:
        if self._device.type == "cuda":
            # Where the ranks of one machine meet is nobody else's business.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
            nccl: Any = dist.ProcessGroupNCCL
            nccl_options = nccl.Options()
            nccl_options._timeout = _WITHOUT_LIMIT
            return nccl(store, self.rank, self.size, nccl_options)
        gloo: Any = ProcessGroupGloo  # whose stubs know no options
        options = gloo._Options()
        options._timeout = _WITHOUT_LIMIT
        options._threads = 1
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        return gloo(store, self.rank, self.size, options)

    def _lost(self, error: RuntimeError) -> GroupLostError:
        # [file:line] what happened. What it may mean, and wishes of good luck.
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
        return GroupLostError(f"worker {self.rank} has lost the others: {reason}")
