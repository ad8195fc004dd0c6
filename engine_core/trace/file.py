"""The trace of `--sched-trace`: its file, which a thread writes so that a slow disk delays no step.

    step ── write_line ──▶ buffer, at most MAX_UNWRITTEN bytes ── thread, 4 times a second ──▶ file

Start with `start_trace`. Lines are encoded by the caller, in microseconds; a thread that encoded
them would hold the interpreter lock while a step is scheduled.
"""

import errno
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from engine_core.pool_plan import PoolPlan
from engine_core.trace.recorder import TraceRecorder
from proto.errors import ConfigError
from proto.messages.lifecycle import WorkerReady
from proto.messages.multimodal import EncoderLimits
from proto.messages.sched_trace import Dropped, TraceEnd, TraceHeader
from proto.settings.config import SchedulerConfig, TraceConfig

logger = logging.getLogger("tokend.trace")

MAX_UNWRITTEN: Final = 16 << 20
"""Bytes in the buffer beyond which further lines are dropped and counted."""
_PAUSE_SECONDS: Final = 0.25
_PRIVATE: Final = 0o600


def path_of_epoch(path: str, epoch: int) -> str:
    """Return the path for an engine: that of the flag for epoch 1, run.2.jsonl for epoch 2."""
    if epoch == 1:
        return path
    name = Path(path)
    return str(name.with_name(f"{name.stem}.{epoch}{name.suffix}"))


def _open(path: str) -> int:
    """Create or empty a private file; raises OSError for a device, a pipe or a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, _PRIVATE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        os.fchmod(descriptor, _PRIVATE)
        os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class TraceFile:
    """Writes lines to a file that only its owner may read; an old file is overwritten.

    max_bytes: maximum size of the file; the trace ends there. has_ended: after that, or after an
    error of the disk. Raises ConfigError if the file cannot be created.
    """

    def __init__(self, path: str, max_bytes: int, max_unwritten: int = MAX_UNWRITTEN) -> None:
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise ConfigError(f"--sched-trace {path}: {error.strerror}") from None
        self._path = path
        self._bytes_left = max_bytes
        self._max_unwritten = max_unwritten
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.has_ended = False
        self._thread = threading.Thread(target=self._run_thread, name="trace", daemon=True)
        self._thread.start()

    def write_line(self, line: msgspec.Struct) -> None:
        """Buffer a line, or drop it if the trace has ended or the buffer is full; never waits."""
        with self._lock:
            if self.has_ended:
                return
            if self._num_dropped:
                self._append_num_dropped()
            self._append(line)

    def close(self) -> None:
        """Write the buffer and the last line, and close the file."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        with self._lock:
            if not self.has_ended:
                if self._num_dropped:
                    self._append(Dropped(num_lines=self._num_dropped), forced=True)
                self._append(TraceEnd(reason="shutdown"), forced=True)
        self._write()
        os.close(self._descriptor)

    def _append_num_dropped(self) -> None:
        """Append the number of dropped lines; if there is no room, this line counts as dropped."""
        number, self._num_dropped = self._num_dropped, 0
        if not self._append(Dropped(num_lines=number)):
            self._num_dropped += number - 1

    def _append(self, line: msgspec.Struct, forced: bool = False) -> bool:
        buffer = self._buffer
        start = len(buffer)
        if start > self._max_unwritten and not forced:
            self._num_dropped += 1
            return False
        self._encoder.encode_into(line, buffer, -1)
        buffer += b"\n"
        size = len(buffer) - start
        if size > self._bytes_left and not self.has_ended:
            del buffer[start:]
            self._end("--sched-trace-max-bytes is reached", b'{"kind":"end","reason":"limit"}\n')
            return False
        self._bytes_left -= size
        return True

    def _end(self, reason: str, last_line: bytes = b"") -> None:
        self.has_ended = True
        self._buffer += last_line
        logger.warning("the trace %s ends: %s", self._path, reason)

    def _run_thread(self) -> None:
        while not self._closing.wait(_PAUSE_SECONDS):
            self._write()

    def _write(self) -> None:
        with self._lock:
            buffer, self._buffer = self._buffer, bytearray()
        view = memoryview(buffer)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            with self._lock:
                if not self.has_ended:
                    self._end(str(error))
                self._buffer.clear()


def start_trace(
    config: TraceConfig,
    scheduler: SchedulerConfig,
    plan: PoolPlan,
    worker: WorkerReady,
    epoch: int,
    enable_prefix_caching: bool,
    encoder: EncoderLimits | None = None,
    engine: int = 0,
) -> tuple[TraceFile, TraceRecorder] | None:
    """Return the trace of an engine and what writes its lines; None without --sched-trace.

    scheduler: settings in effect. epoch, engine: of the engine, and its index. encoder: of a
    model that reads images.
    Raises ConfigError if the file cannot be created.
    """
    if config.sched_trace is None:
        return None
    header = TraceHeader(
        epoch=epoch,
        started_at=time.time(),
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        enable_prefix_caching=enable_prefix_caching,
        max_model_len=plan.max_model_len,
        scheduler=scheduler,
        groups=tuple(worker.geometry.groups),
        device=worker.device_name,
        num_state_slots=plan.num_state_slots,
        num_draft_positions=worker.num_draft_positions,
        num_dropped_blocks=worker.num_dropped_blocks,
        encoder=encoder,
        engine=engine,
    )
    started_at = time.monotonic()
    file = TraceFile(path_of_epoch(config.sched_trace, epoch), config.sched_trace_max_bytes)
    file.write_line(header)
    num_seats = min(scheduler.max_num_seqs, scheduler.token_budget)
    recorder = TraceRecorder(
        file.write_line,
        started_at=started_at,
        num_seats=num_seats,
        image_token_id=-1 if encoder is None else encoder.vision.image_token_id,
    )
    return file, recorder
