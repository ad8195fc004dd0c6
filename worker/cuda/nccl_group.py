"""A rank group between GPUs, by NCCL."""

import os
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from worker.parallel.torch_group import NO_LIMIT, TorchGroup

_LOOPBACK_INTERFACE: Final = "lo"


class NcclGroup(TorchGroup):
    """A TorchGroup whose exchanges are queued on the device."""

    def _await_exchange(self, work: Any) -> None:
        """Let the device wait: a wait with a limit would block the host, also in a capture."""
        work.wait()

    def _create_process_group(self, store: FileStore) -> Any:
        # Ranks of one machine must not be reachable from other machines.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = NO_LIMIT
        return nccl(store, self.rank, self.size, options)
