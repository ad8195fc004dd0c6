"""Profiles of a worker's steps by torch's profiler, written as traces for Perfetto or Chrome."""

import gzip
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from proto.messages.profiler import ProfileCall, ProfileReply
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.profiler_config import ProfilerConfig

_NOTHING: Final = nullcontext()
_CHUNK: Final = 1 << 20
logger = logging.getLogger("tokend.worker")


class StepProfiler:
    """Records the steps between two calls of the engine, up to a number and a time.

    At these limits it stops recording; it writes the trace at the second call.
    config: None refuses all calls. rank, index: of the worker. activities: what is recorded.
    """

    def __init__(
        self,
        config: ProfilerConfig | None,
        rank: int,
        index: int,
        activities: Sequence[torch.profiler.ProfilerActivity],
    ) -> None:
        self._config = config
        self._rank = rank
        self._index = index
        self._activities = activities
        self._profile: Any = None
        self._is_recording = False
        self._num_delayed = self._num_recorded = 0
        self._end = 0.0
        self._failure = ""

    def answer(self, call: ProfileCall) -> ProfileReply:
        """Carry out a call; the reply has the error if it fails."""
        path = error = ""
        try:
            if call.action == "start":
                self._start()
            elif call.action == "stop":
                path = self._write()
            else:
                self.discard()
        except Exception as failure:  # a profile that fails must not end the worker
            self._fail(failure)
            error = self._failure
        return ProfileReply(call.epoch, self._rank, call.number, path, error)

    def step(self, step: SchedulerOutput) -> AbstractContextManager[object]:
        """Return a context in which a step runs, so that it is a range in the trace."""
        if self._profile is None or not step.total_num_scheduled_tokens:
            return _NOTHING
        try:
            return self._next_range(step)
        except Exception as failure:
            self._fail(failure)
            return _NOTHING

    def discard(self) -> None:
        """End a profile without writing it; one that cannot be ended is logged."""
        profile, self._profile = self._profile, None
        if self._is_recording:
            self._is_recording = False
            try:
                profile.stop()
            except Exception as failure:  # a profile that fails must not end the worker
                logger.warning("a profile could not be ended: %s", failure)

    def _fail(self, failure: Exception) -> None:
        self._failure = str(failure) or type(failure).__name__
        self._profile, self._is_recording = None, False

    def _next_range(self, step: SchedulerOutput) -> AbstractContextManager[object]:
        config = self._config
        assert config is not None, "a profile runs"
        if self._num_delayed:
            self._num_delayed -= 1
            return _NOTHING
        if self._num_recorded == config.max_iterations or time.monotonic() > self._end:
            self._stop()
            return _NOTHING
        if not self._is_recording:
            self._record()
        self._num_recorded += 1
        return torch.profiler.record_function(
            f"step {step.step}: {step.total_num_scheduled_tokens} tokens of "
            f"{len(step.new_requests) + len(step.cached_requests.seq_ids)} sequences"
        )

    def _start(self) -> None:
        config = self._config
        assert config is not None, "the engine has checked it"
        self.discard()
        os.makedirs(config.torch_profiler_dir, exist_ok=True)
        if not os.access(config.torch_profiler_dir, os.W_OK):
            raise PermissionError(f"{config.torch_profiler_dir} is not writable")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it writes lines of its own to our log
        self._profile = torch.profiler.profile(
            activities=self._activities,
            with_stack=config.torch_profiler_with_stack,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_flops=config.torch_profiler_with_flops,
        )
        self._num_delayed, self._num_recorded = config.delay_iterations, 0
        self._end = time.monotonic() + config.max_seconds
        self._failure = ""
        if not self._num_delayed:
            self._record()  # now, because it takes a second, or fails

    def _record(self) -> None:
        self._profile.start()
        self._is_recording = True

    def _stop(self) -> None:
        if self._is_recording:
            self._is_recording = False
            self._profile.stop()
        self._end = 0.0

    def _write(self) -> str:
        """Return the path of the trace; "" if there was no step."""
        config = self._config
        if config is None or self._profile is None:
            raise RuntimeError(self._failure or "no profile is running")
        self._stop()
        profile, self._profile = self._profile, None
        if not self._num_recorded:
            return ""
        path = config.path(f"worker-{self._index}", "pt.trace.json.gz")
        with tempfile.TemporaryDirectory(dir=config.torch_profiler_dir, prefix=".") as workspace:
            plain, packed = (os.path.join(workspace, name) for name in ("trace.json", "trace.gz"))
            profile.export_chrome_trace(plain)  # its own compression takes twenty times as long
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, _CHUNK)
            os.replace(packed, path)
        return path
