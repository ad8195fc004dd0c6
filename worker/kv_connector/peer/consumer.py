"""The consumer's end: heartbeats for requests that wait, and loads from the producers' workers."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Final

from proto.messages.kv_peer import (
    MAX_WATCHED,
    Alive,
    Fetch,
    Heartbeat,
    PeerLayout,
    PeerLoad,
    PeerSource,
    PeerWorkerAddress,
    Release,
)
from proto.settings.kv_peer import PeerSettings
from worker.kv_connector.offload.base import TransferResult
from worker.kv_connector.offload.block_image import BlockBytes
from worker.kv_connector.offload.transfer_queue import BlockCopy, CopyJob
from worker.kv_connector.peer.channel import (
    BlockTransport,
    Channel,
    ConnectionLostError,
    PeerError,
    batch_blocks,
    check_user,
    greet_producer,
    open_as_consumer,
    open_transport,
)
from worker.kv_connector.peer.producer import socket_path

logger = logging.getLogger("tokend.kv_peer")

HEARTBEAT_SECONDS: Final = 5.0
_MAX_LOADS: Final = 4
_MAX_RELEASES: Final = 2
"""At a time."""
_MAX_CONNECTIONS: Final = 3
"""Connections of a load: after one is lost, the next fetches what is missing."""
_SHORT_SECONDS: Final = 2.0
"""For a connection with its greeting, a heartbeat or a release."""
_CLOSE_SECONDS: Final = 1.0


class PeerFetcher:
    """Loads blocks and sends heartbeats, on its own threads. notify: called when a load has ended.

    Only this object's threads use `blocks`, one at a time.
    """

    def __init__(
        self,
        settings: PeerSettings,
        secret: bytes,
        layout: PeerLayout,
        blocks: BlockBytes,
        notify: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._layout = layout
        self._blocks = blocks
        self._notify = notify
        self._copy_lock = threading.Lock()
        self._changed = threading.Condition()
        self._watched: dict[str, PeerSource] = {}
        self._open: dict[int, CopyJob] = {}
        self._sockets: set[socket.socket] = set()
        self._finished: list[TransferResult] = []
        self._is_closed = False
        self._executor = ThreadPoolExecutor(_MAX_LOADS, "kv peer")
        self._releases = ThreadPoolExecutor(_MAX_RELEASES, "kv peer")
        self._heart = threading.Thread(target=self._send_heartbeats, name="kv peer", daemon=True)
        self._heart.start()

    def watch(self, sources: Sequence[PeerSource]) -> None:
        """Send heartbeats for the KV of requests, from now on."""
        if sources:
            with self._changed:
                self._watched |= {source.request_id: source for source in sources}
                self._changed.notify_all()

    def start(self, load: PeerLoad) -> None:
        """Begin a load; called in the worker loop's thread."""
        job = CopyJob(load.job, 1, self._settings.load_timeout, self._blocks.record_steps())
        with self._changed:
            self._open[load.job.job_id] = job
        self._executor.submit(self._load, load, job)

    def release(self, source: PeerSource, reason: str) -> None:
        """End the heartbeats, and say to the producer that nothing more of a request is wanted."""
        with self._changed:
            self._watched.pop(source.request_id, None)
            if not self._is_closed:
                self._releases.submit(self._release, source, reason)

    def pop_finished(self) -> list[TransferResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """End all loads; the cache is not written to any more when this returns."""
        with self._changed:
            self._is_closed = True
            jobs = list(self._open.values())
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        for job in jobs:
            job.end()
        for executor in (self._executor, self._releases):
            executor.shutdown(wait=False, cancel_futures=True)
        self._heart.join(_CLOSE_SECONDS)

    # Loads

    def _load(self, load: PeerLoad, job: CopyJob) -> None:
        failure = ""
        try:
            job.wait_for_steps()
            self._fetch_all(load, job)
        except PeerError as error:
            failure = str(error)
        except Exception as error:  # a failure ends its load, not the thread of later ones
            logger.exception("a load from another daemon has failed")
            failure = type(error).__name__
        if failure and not self._is_closed:
            logger.warning("KV of %s was not loaded: %s", load.source.host, failure)
        result = job.end()
        with self._changed:
            self._open.pop(load.job.job_id, None)
            if result is not None:
                self._finished.append(result)
        self._notify()
        self.release(load.source, failure)

    def _fetch_all(self, load: PeerLoad, job: CopyJob) -> None:
        """Copy all blocks of a load; raises PeerError."""
        missing = list(job.copies)
        for num_left in reversed(range(_MAX_CONNECTIONS)):
            try:
                deadline = time.monotonic() + job.seconds_left
                with self._connected(load.source, deadline) as channel:
                    self._fetch(channel, load, job, missing)
                return
            except ConnectionLostError:
                if not num_left or self._is_closed or job.seconds_left <= 0.0:
                    raise

    def _fetch(
        self, channel: Channel, load: PeerLoad, job: CopyJob, missing: list[BlockCopy]
    ) -> None:
        """Fetch blocks in batches, of which two are under way; done ones leave `missing`."""
        size = batch_blocks(self._layout.block_bytes)
        batches = [missing[start : start + size] for start in range(0, len(missing), size)]
        transport: BlockTransport | None = None
        try:
            num_asked = 0
            for index, batch in enumerate(batches):
                for area in range(num_asked, min(index + 2, len(batches))):
                    keys = [block.key for block in batches[area]]
                    channel.send(Fetch(load.source.request_id, load.tenant, keys, area % 2))
                    num_asked += 1
                if transport is None:
                    transport = open_transport(
                        self._settings, channel, self._layout.block_bytes, is_producer=False
                    )
                received = transport.receive(len(batch), index % 2)
                for block, memory in zip(batch, received, strict=True):
                    self._copy_in(job, block, memory)
                    job.mark_done(block)
                    del missing[0]
        finally:
            if transport is not None:
                transport.close()

    def _copy_in(self, job: CopyJob, block: BlockCopy, memory: memoryview) -> None:
        def copy(block: BlockCopy) -> int:
            with self._copy_lock:
                self._blocks.copy_in(memory, block.blocks[0])
            return self._blocks.block_bytes

        if not job.access_cache(block, copy):
            raise PeerError("the load was ended")

    # Heartbeats and ends

    def _release(self, source: PeerSource, reason: str) -> None:
        try:
            with self._connected(source, time.monotonic() + _SHORT_SECONDS) as channel:
                channel.send(Release(source.request_id, reason))
                channel.receive_answer(Alive)
        except PeerError as error:  # its lease ends
            logger.debug("no release at %s: %s", source.host, error)

    def _send_heartbeats(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                watched = list(self._watched.values())
                if not watched:
                    self._changed.wait()
                    continue
            by_worker: dict[tuple[str, PeerWorkerAddress], list[PeerSource]] = {}
            for source in watched[:MAX_WATCHED]:
                rank = min(self._layout.rank, len(source.workers) - 1)
                by_worker.setdefault((source.host, source.workers[rank]), []).append(source)
            silent: set[tuple[str, int | str]] = set()
            for (host, worker), sources in by_worker.items():
                place = host, worker.port or worker.worker_id
                if place not in silent and not self._send_heartbeat(sources):
                    silent.add(place)
            with self._changed:
                self._wait_for_others({source.request_id for source in watched})

    def _wait_for_others(self, known: set[str]) -> None:
        """Wait until the next heartbeat is due, or for a request that has had none."""
        self._changed.wait_for(
            lambda: self._is_closed or not self._watched.keys() <= known, HEARTBEAT_SECONDS
        )

    def _send_heartbeat(self, sources: Sequence[PeerSource]) -> bool:
        """Send a heartbeat to one worker; return whether it answered, even with a refusal."""
        try:
            with self._connected(sources[0], time.monotonic() + _SHORT_SECONDS) as channel:
                channel.send(Heartbeat([source.request_id for source in sources]))
                channel.receive_answer(Alive)
        except PeerError as error:
            logger.debug("no heartbeat at %s: %s", sources[0].host, error)
            return not isinstance(error, ConnectionLostError)
        return True

    @contextmanager
    def _connected(self, source: PeerSource, deadline: float) -> Iterator[Channel]:
        """Connect with the producer's worker of this rank; raises PeerError.

        A producer that does not greet in time fails long before the deadline of a load, so it does
        not keep the threads of other loads.
        """
        if len(source.workers) != self._layout.num_ranks:
            raise PeerError(
                f"the producer has {len(source.workers)} tensor-parallel workers, "
                f"not {self._layout.num_ranks}"
            )
        worker = source.workers[self._layout.rank]
        uses_memory = self._settings.transport == "memory"
        if not uses_memory and not worker.port:
            raise PeerError("the producer does not listen on TCP: it has another transport")
        if uses_memory:
            family = socket.AF_UNIX
        else:
            family = socket.AF_INET6 if ":" in source.host else socket.AF_INET
        greeting_end = min(deadline, time.monotonic() + _SHORT_SECONDS)
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                stack.enter_context(self._tracked(connection))
                connection.settimeout(max(0.001, greeting_end - time.monotonic()))
                if uses_memory:
                    connection.connect(str(socket_path(self._settings, worker.worker_id)))
                    check_user(connection)
                else:
                    connection.connect((source.host, worker.port))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                reason = error.strerror or str(error)
                raise ConnectionLostError(f"no connection to the producer: {reason}") from None
            channel = Channel(connection, greeting_end)
            greet_producer(channel, self._secret, worker.worker_id)
            open_as_consumer(channel, self._layout)
            channel.deadline = deadline
            yield channel

    @contextmanager
    def _tracked(self, connection: socket.socket) -> Iterator[None]:
        with self._changed:
            if self._is_closed:
                raise PeerError("this worker stops")
            self._sockets.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._sockets.discard(connection)
