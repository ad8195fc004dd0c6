"""The adapters that a worker holds, and the thread that loads them beside the steps.

    LoadAdapter ─▶ AdapterStore.begin_load ─▶ thread: read, check, lay out ─▶ AdapterLoaded
    steps ─▶ AdapterStore.running: the products add the adapters of the step's rows
    DropAdapter ─▶ AdapterStore.drop

The cores of a CPU belong to the steps. So the thread works in slices, none of which begins while a
step is computed; a step waits for the end of one slice at most. A slice has two milliseconds, or a
share of the last step's time, which grows with the number of loads, because requests may wait for
them. Files are read between slices, because a disk may not answer; then another thread takes the
place of the one that waits when the adapter is dropped.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
import torch

from proto.errors import ErrorInfo, TokendError
from proto.messages.lora import AdapterLoaded, LoadAdapter
from proto.runtime.host_resources import ALLOWED_CPUS
from proto.runtime.process import describe
from proto.runtime.sockets import EventFd
from worker.batch.step_inputs import TokenAdapters
from worker.layers.adapters import Adapter, AdapterRows, ImageAdapter, StepAdapters
from worker.loader.adapters.build import AdapterLoader
from worker.loader.adapters.files import READS, Slices

logger = logging.getLogger("tokend.worker")

_SLICE_SECONDS: Final = 0.002
_SHARE_PER_LOAD, _LARGEST_SHARE = 0.15, 0.5
"""Of the time of a step, for a slice after it: what loads may add to the time per token."""
_PAUSE_SECONDS: Final = 0.0005
"""Between two slices, so that a step that waits begins first."""
_JOIN_SECONDS: Final = 1.0
"""Longest wait for the end of a thread whose disk may not answer."""


class AdapterStore:
    """Adapters by the ids that the engine gives them.

    step: what the products of the model ask. rank: the worker's. All methods but the thread's own
    are called by the thread that runs the steps.
    """

    def __init__(self, loader: AdapterLoader, step: StepAdapters, rank: int = 0) -> None:
        self._loader = loader
        self._step = step
        self._rank = rank
        self._adapters: dict[int, Adapter] = {}
        self._wanted: dict[int, LoadAdapter] = {}
        self._queue: SimpleQueue[LoadAdapter | None] = SimpleQueue()
        self._reading: LoadAdapter | None = None
        self._finished: SimpleQueue[tuple[LoadAdapter, Adapter | None, AdapterLoaded]] = (
            SimpleQueue()
        )
        self._slice = threading.Lock()
        self._step_seconds = 0.0
        self._signal = EventFd()
        self._thread: threading.Thread | None = None
        self._latest: tuple[bytes, tuple[AdapterRows, ...]] = (b"", ())

    @property
    def descriptor(self) -> int:
        """Readable when `take_finished` has something to return."""
        return self._signal.descriptor

    def begin_load(self, message: LoadAdapter) -> None:
        """Have the thread load an adapter; `take_finished` returns the answer."""
        self._wanted[message.lora_int_id] = message
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._queue,), name="adapters", daemon=True
            )
            self._thread.start()
        self._queue.put(message)

    def take_finished(self) -> list[AdapterLoaded]:
        """Return the answers to loads that have ended; their adapters are ready for steps."""
        self._signal.clear()
        answers = []
        while not self._finished.empty():
            message, adapter, answer = self._finished.get()
            if self._wanted.get(message.lora_int_id) is not message:
                continue  # dropped meanwhile
            del self._wanted[message.lora_int_id]
            if adapter is not None:
                self._adapters[message.lora_int_id] = adapter
            answers.append(answer)
        return answers

    def drop(self, lora_int_id: int) -> None:
        """Free an adapter, or do not finish loading it."""
        message = self._wanted.pop(lora_int_id, None)
        if message is not None and self._reading is message:
            self._replace_thread()
        self._adapters.pop(lora_int_id, None)
        self._latest = (b"", ())
        self._step.forget()

    def clear(self) -> None:
        """Free all adapters: another engine gives ids of its own."""
        self._wanted.clear()
        if self._reading is not None:
            self._replace_thread()
        self._adapters.clear()
        self._latest = (b"", ())
        self._step.forget()

    def close(self) -> None:
        """End the thread."""
        self._wanted.clear()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_SECONDS)
            self._thread = None
        self._signal.close()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Keep the cores for a step."""
        with self._slice:
            started = time.monotonic()
            yield
            self._step_seconds = time.monotonic() - started

    def running(self, adapters: TokenAdapters) -> AbstractContextManager[None]:
        """Let products and logits of some rows add their adapters."""
        return self._step.running(self._rows_of(adapters))

    def of_image(self, lora_int_id: int, scale: float) -> ImageAdapter | None:
        """Return the adapter with which an image is encoded; None for the id 0.

        The image keeps it, also if it is dropped before the image is encoded.
        """
        if not lora_int_id:
            return None
        found = self._adapters.get(lora_int_id)
        assert found is not None, f"an image has adapter {lora_int_id}, which is not here"
        return ImageAdapter(self._step, found, scale)

    def _rows_of(self, adapters: TokenAdapters) -> tuple[AdapterRows, ...]:
        """Return the rows of each adapter; those of the last call are kept."""
        key = adapters.ids.tobytes() + adapters.scales.tobytes()
        if key != self._latest[0]:
            groups = []
            for number in np.unique(adapters.ids[adapters.ids > 0]).tolist():
                assert number in self._adapters, f"a step names adapter {number}, which is not here"
                rows = np.flatnonzero(adapters.ids == number)
                groups.append(
                    AdapterRows(
                        self._adapters[number],
                        torch.from_numpy(rows),
                        torch.from_numpy(adapters.scales[rows]),
                    )
                )
            self._latest = (key, tuple(groups))
        return self._latest[1]

    def _replace_thread(self) -> None:
        """Let later loads have another thread: this one may wait for a disk for ever."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        self._queue, self._thread, self._reading = SimpleQueue(), None, None
        for message in list(self._wanted.values()):
            self.begin_load(message)

    # ---- The thread ----

    def _run(self, queue: SimpleQueue[LoadAdapter | None]) -> None:
        torch.set_num_threads(1)  # a team of its own would spin on the cores of the steps
        os.sched_setaffinity(0, ALLOWED_CPUS)
        while (message := queue.get()) is not None:
            adapter: Adapter | None = None
            try:
                adapter = self._load(message)
            except TokendError as error:
                info = ErrorInfo("invalid_request", str(error), "lora_path", self._rank)
                answer = AdapterLoaded(message.epoch, self._rank, message.lora_int_id, error=info)
            except Exception as error:  # an error that a file causes must not end the steps
                logger.exception("loading the adapter in %s failed", message.path)
                answer = AdapterLoaded(
                    message.epoch,
                    self._rank,
                    message.lora_int_id,
                    error=describe(error, self._rank),
                )
            else:
                if adapter is None:
                    continue
                answer = AdapterLoaded(
                    epoch=message.epoch,
                    rank=self._rank,
                    lora_int_id=message.lora_int_id,
                    digest=adapter.digest,
                    lora_rank=adapter.rank,
                    num_bytes=adapter.num_bytes,
                    effect=adapter.effect,
                    changes_images=adapter.changes_images,
                )
            if self._wanted.get(message.lora_int_id) is not message:
                continue  # the store may be closed
            self._finished.put((message, adapter, answer))
            self._signal.notify()

    def _load(self, message: LoadAdapter) -> Adapter | None:
        """Load an adapter in slices; return None if it is not wanted any more."""
        work = self._loader.load(message.path, message.digest)
        what: str | None = READS
        paused = time.monotonic()
        try:
            while self._wanted.get(message.lora_int_id) is message:
                if what == READS:
                    what = self._read(message, work)
                else:
                    with self._slice:
                        end = time.monotonic() + self._slice_seconds()
                        while what != READS and time.monotonic() < end:
                            what = next(work)
                if what != READS or time.monotonic() > paused + _SLICE_SECONDS:
                    time.sleep(_PAUSE_SECONDS)
                    paused = time.monotonic()
        except StopIteration as finished:
            found: Adapter = finished.value
            return found
        return None

    def _slice_seconds(self) -> float:
        share = min(_SHARE_PER_LOAD * len(self._wanted), _LARGEST_SHARE)
        return max(_SLICE_SECONDS, share * self._step_seconds)

    def _read(self, message: LoadAdapter, work: Slices[Adapter]) -> str | None:
        """Do a piece of work that may wait for a disk; return what it yields."""
        self._reading = message
        try:
            if self._wanted.get(message.lora_int_id) is not message:
                return READS  # dropped before `drop` could see that it is read
            what: str | None = next(work)
            return what
        finally:
            if self._reading is message:  # otherwise another thread reads
                self._reading = None
