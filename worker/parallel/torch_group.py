"""A rank group over torch.distributed: gloo between CPUs, NCCL between GPUs.

The ranks find each other by a file in the daemon's private directory. Gloo's connections, and the
ones by which NCCL ranks meet, are TCP on the loopback interface (docs/security.md).

    gloo   the host waits for each exchange, without a time limit
    NCCL   an exchange is queued, and later kernels wait for it on the device. The host goes on; it
           learns from the supervisor that another rank has ended, and `leave` frees the device
"""

import contextlib
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from worker.parallel.group import LONG_WAIT_SECONDS, GroupLostError, RankGroup

NO_LIMIT: Final = timedelta(days=30)
"""Time limit of an exchange. The whole daemon may be stopped and continued, so only the supervisor
decides that a rank hangs."""
_LONG_WAIT: Final = timedelta(seconds=LONG_WAIT_SECONDS)
_POLL_SECONDS: Final = 0.005
_LOOPBACK: Final = "127.0.0.1"


def rendezvous_path(run_dir: str, epoch: int, purpose: str = "steps") -> str:
    """Return the file by which the ranks of an epoch find each other; a path is used once."""
    return os.path.join(run_dir, f"e{epoch}.{purpose}.ranks")


class TorchGroup(RankGroup):
    """A rank group over a process group of torch, one for each `join`.

    run_dir: the daemon's private directory. on_long_wait: called once for each exchange that waits
    for other ranks longer than LONG_WAIT_SECONDS. is_interrupted: returns whether `join` should
    stop waiting, because the supervisor has sent a command.
    """

    def __init__(
        self,
        run_dir: str,
        rank: int,
        size: int,
        device: torch.device,
        on_long_wait: Callable[[], None],
        is_interrupted: Callable[[], bool],
    ) -> None:
        super().__init__(rank, size)
        self._run_dir = run_dir
        self._device = device
        self._on_long_wait = on_long_wait
        self._is_interrupted = is_interrupted
        self._process_group: Any = None

    def join(self, epoch: int, purpose: str = "steps") -> None:
        self.leave()
        try:
            path = rendezvous_path(self._run_dir, epoch, purpose)
            store = FileStore(path, self.size)
            self._await_ranks(store)
            self._process_group = self._create_process_group(store)
        except RuntimeError as error:
            raise self._group_lost(error) from error
        self.gather(torch.zeros(1, device=self._device))  # after this no rank needs the file
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def leave(self) -> None:
        if self._process_group is not None:
            self._process_group.abort()
        self._process_group = None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        shards = x.new_empty((self.size, *x.shape))
        # gloo wants the shards concatenated along the first dimension
        flat = shards.view(self.size * x.shape[0], *x.shape[1:])
        if self._process_group is None:
            raise GroupLostError(f"worker {self.rank} has left its rank group")
        try:
            self._await_exchange(self._process_group._allgather_base(flat, x.contiguous()))
        except RuntimeError as error:
            raise self._group_lost(error) from error
        return shards

    def _await_exchange(self, work: Any) -> None:
        """Wait for an exchange; raise RuntimeError if it failed."""
        try:
            work.wait(_LONG_WAIT)
        except RuntimeError:
            if work.is_completed():
                raise
            self._on_long_wait()
            work.wait(NO_LIMIT)

    def _await_ranks(self, store: FileStore) -> None:
        """Wait until every rank has opened the file: later steps have no usable time limit."""
        store.add("here", 1)
        while (here := store.add("here", 0)) < self.size:
            if self._is_interrupted():
                raise GroupLostError(
                    f"worker {self.rank}: {here} of {self.size} workers had met when the "
                    "supervisor interrupted"
                )
            time.sleep(_POLL_SECONDS)

    def _create_process_group(self, store: FileStore) -> Any:
        gloo: Any = ProcessGroupGloo  # its type stubs lack the options
        options = gloo._Options()
        options._timeout = NO_LIMIT
        options._threads = 1
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        return gloo(store, self.rank, self.size, options)

    def _group_lost(self, error: RuntimeError) -> GroupLostError:
        # torch's text: "[file:line] what happened. Possible reasons and advice."
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
        return GroupLostError(f"worker {self.rank} has lost its rank group: {reason}")
