"""A small KV cache with handlers of a medium, and a Redis server for one test."""

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.messages.kv_connector import DeviceBlocks, TransferJob
from tests.fakes.devices import CPU
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.kv_connector.offload.base import HandlerContext, OffloadingHandler, TransferResult

FINGERPRINT = bytes(range(32))
BLOCK_SIZE = 4
LIMIT = 20.0
"""Seconds after which a test fails instead of waiting."""

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


def key(number: int) -> bytes:
    """Return a key as the connector makes it: a hash, then group, ranks and factor."""
    return number.to_bytes(32, "big") + b"\x00\x01\x00\x01\x00"


def small_cache(num_blocks: int = 20, dtype: torch.dtype = torch.float32) -> KVCache:
    """Return a KV cache whose blocks all have different content."""
    layout = kv_layout([None] * 2)
    cache = KVCache(kv_cache_geometry(layout, 2, 8, dtype), layout, num_blocks, BLOCK_SIZE)
    content = torch.arange(cache.buffer.numel(), dtype=torch.float32) % 251
    cache.buffer.copy_(content.to(dtype).view(cache.buffer.shape))
    for block in range(num_blocks):
        cache.buffer[block].view(-1)[0] = block
    return cache


class Rank:
    """One worker's KV cache, its handlers, and the results of its copies."""

    def __init__(
        self,
        make_handlers: Callable[[Mapping[str, Any], HandlerContext], dict[Any, OffloadingHandler]],
        extra: Mapping[str, Any],
        medium: str,
        factor: int = 1,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.cache = small_cache()
        self.medium = medium
        self._notified = threading.Semaphore(0)
        context = HandlerContext(
            self.cache, CPU, factor, rank, num_ranks, FINGERPRINT, self._notified.release
        )
        handlers = make_handlers(extra, context)
        self.load, self.store = handlers[medium, "GPU"], handlers["GPU", medium]
        self._results: list[TransferResult] = []
        self._next_job = 0

    def start_copy(self, is_load: bool, blocks: list[int], keys: list[bytes], skip: int = 0) -> int:
        """Start a copy of group 0; return its job id."""
        self._next_job += 1
        job = TransferJob(
            self._next_job,
            self.medium,
            is_load,
            [DeviceBlocks(0, blocks, skip)],
            keys=[keys],
        )
        (self.load if is_load else self.store).transfer_async(job)
        return self._next_job

    def wait_for_copy(self) -> TransferResult:
        """Return the next finished copy; waits for the notification, as a worker's loop does."""
        assert self._notified.acquire(timeout=LIMIT), "no copy was reported as finished"
        self._results += [*self.load.get_finished(), *self.store.get_finished()]
        return self._results.pop(0)

    def stored(self, blocks: list[int], keys: list[bytes]) -> bool:
        """Store blocks and wait; return whether that succeeded."""
        job = self.start_copy(False, blocks, keys)
        result = self.wait_for_copy()
        assert result.job_id == job
        return result.succeeded

    def loaded(self, blocks: list[int], keys: list[bytes], skip: int = 0) -> list[int]:
        """Load blocks and wait; return the blocks that are invalid."""
        job = self.start_copy(True, blocks, keys, skip)
        result = self.wait_for_copy()
        assert result.job_id == job
        assert result.succeeded == (not result.failed_blocks)
        return result.failed_blocks

    def bytes_of(self, block: int) -> bytes:
        return self.cache.buffer[block].numpy().tobytes()

    def close(self) -> None:
        self.load.close()
        self.store.close()


class RedisServer:
    """A redis-server process for one test, on a free port."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._folder = folder
        self._options = options
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the process; return when it replies, and so listens on its Unix socket as well.

        It accepts connections to its port before that socket exists.
        """
        words = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        words += ["--save", "", "--appendonly", "no", "--dir", str(self._folder), *self._options]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        end = time.monotonic() + LIMIT
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), LIMIT) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(1):  # also -NOAUTH
                        assert self._process.poll() is None, "another server has the port"
                        return
            except OSError:
                pass
            assert self._process.poll() is None, "redis-server has ended"
            assert time.monotonic() < end, "redis-server does not start"
            time.sleep(0.002)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop the process: it still accepts connections but sends no replies."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.go_on()
        server.kill()


def eventually(true: Callable[[], bool]) -> None:
    """Wait until a condition that another thread fulfils is true."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end, "it never became true"
        threading.Event().wait(0.002)
