"""A group of ranks over torch.distributed: gloo between CPUs, NCCL between GPUs.

Owns the process group of one epoch. The ranks find each other by a file in the daemon's private
directory. Gloo's own connections are TCP on the loopback interface (docs/security.md).
"""

import os
import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from worker.parallel.group import GroupLostError

MEETING_SECONDS: Final = 30.0
"""For the ranks of an epoch to come: all have loaded, and are told to meet at the same time."""
_WITHOUT_LIMIT: Final = timedelta(days=30)
"""Of a call. A daemon may be stopped as a whole and go on, so only the supervisor says who hangs."""
_POLL_SECONDS: Final = 0.005
_LOOPBACK: Final = "127.0.0.1"


def rendezvous_path(run_dir: str, epoch: int) -> str:
    """The file by which the ranks of an epoch find each other; never the same twice."""
    return os.path.join(run_dir, f"e{epoch}.ranks")


class TorchGroup:
    """A RankGroup. run_dir: the daemon's private directory."""

    def __init__(self, run_dir: str, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._run_dir = run_dir
        self._device = device
        self._joined: list[Any] = []

    def join(self, epoch: int) -> None:
        """As the Protocol says; each epoch has a process group of its own."""
        self.leave()
        try:
            store = dist.FileStore(rendezvous_path(self._run_dir, epoch), self.size)
            self._await_all(store)
            self._joined = [self._process_group(store)]
        except RuntimeError as error:
            raise self._lost(error) from error

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
            group._allgather_base(flat, x.contiguous()).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return parts

    def _await_all(self, store: dist.FileStore) -> None:
        """Until every rank is here: what comes then has no limit worth the name."""
        store.add("here", 1)
        deadline = time.monotonic() + MEETING_SECONDS
        while (here := store.add("here", 0)) < self.size:
            if time.monotonic() > deadline:
                raise GroupLostError(
                    f"worker {self.rank}: {here} of {self.size} workers have come in "
                    f"{MEETING_SECONDS:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def _process_group(self, store: dist.FileStore) -> Any:
        if self._device.type == "cuda":
            return dist.ProcessGroupNCCL(store, self.rank, self.size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = _WITHOUT_LIMIT
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _lost(self, error: RuntimeError) -> GroupLostError:
        reason = str(error).partition("\n")[0]
        return GroupLostError(f"worker {self.rank} has lost the others: {reason}")
