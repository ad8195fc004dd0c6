"""Profiles of the engine and its workers, one at a time, at the call of an operator."""

import logging
from dataclasses import dataclass, field
from typing import Final

from engine_core.worker_group import WorkerGroup
from proto.messages.engine_io import AdminCall, AdminReply
from proto.messages.lifecycle import process_name
from proto.runtime.stack_sampler import StackSampler
from proto.settings.profiler_config import ProfilerConfig

logger = logging.getLogger("tokend.profiler")

PROFILER_OFF: Final = "--profiler-config is not set"
LOST: Final = "the workers were restarted, and their traces are lost"


@dataclass(slots=True)
class _OpenCall:
    """A call that the workers have not answered. front_end: its sender."""

    message: AdminCall
    front_end: int
    is_forgotten: bool = False
    errors: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


class EngineProfiler:
    """Starts and stops profiles; replies when all workers have answered."""

    def __init__(self, config: ProfilerConfig, workers: WorkerGroup, engine: int) -> None:
        self._workers = workers
        self._process = process_name("engine_core", engine)
        self._sampler = StackSampler(config, f"engine-{engine}")
        self._worker_epoch: int | None = None  # of the workers that record; None without a profile
        self._call: _OpenCall | None = None

    def begin_call(self, message: AdminCall, front_end: int) -> AdminReply | None:
        """Begin "start_profile" or "stop_profile"; return the reply if it is known now."""
        starts = message.name == "start_profile"
        refusal = self._refusal(starts=starts)
        if refusal:
            return AdminReply(message.epoch, message.call_id, False, refusal)
        call = self._call = _OpenCall(message, front_end)
        try:
            if starts:
                self._worker_epoch = self._workers.epoch
                self._sampler.start()
            else:
                call.paths += self._sampler.stop()
        except OSError as error:
            call.errors.append(f"{self._process}: {error}")
        if not self._has_lost_workers and not (starts and call.errors):
            self._workers.send_profile_call("start" if starts else "stop")
        return None

    def forget_front_end(self, front_end: int) -> None:
        """Send no reply to a front end that has died; its successor knows no such call."""
        if self._call is not None and self._call.front_end == front_end:
            self._call.is_forgotten = True

    def pop_reply(self) -> tuple[int, AdminReply] | None:
        """Return the reply to the open call, and its sender, once it is known."""
        call = self._call
        if call is None:
            return None
        starts = call.message.name == "start_profile"
        if self._has_lost_workers:
            call.errors.append(LOST)
        elif not (starts and call.errors):
            if not self._workers.has_profile_replies:
                return None
            for rank, reply in sorted(self._workers.profile_replies.items()):
                if reply.error:
                    name = process_name("worker", self._workers.first_index + rank)
                    call.errors.append(f"{name}: {reply.error}")
                elif reply.path:
                    call.paths.append(reply.path)
            if starts and call.errors:
                self._workers.send_profile_call("discard")
        if starts and call.errors:
            self._sampler.discard()
        if not starts or call.errors:
            self._worker_epoch = None
        self._call = None
        files, detail = ", ".join(call.paths), "\n".join(call.paths)
        if call.errors:
            detail = "; ".join(call.errors) + (f"; written: {files}" if files else "")
        logger.info("%s: %s", call.message.name, detail if call.errors else files or "done")
        if call.is_forgotten:
            return None
        epoch, call_id = call.message.epoch, call.message.call_id
        return call.front_end, AdminReply(epoch, call_id, not call.errors, detail, len(call.errors))

    @property
    def _has_lost_workers(self) -> bool:
        return self._worker_epoch != self._workers.epoch or not self._workers.is_ready

    def _refusal(self, *, starts: bool) -> str:
        if self._call is not None:
            return "a profile is being started or stopped"
        if not starts:
            return "" if self._worker_epoch is not None else "no profile is running"
        if self._worker_epoch is not None:
            return "a profile is running: end it with POST /stop_profile"
        return "" if self._workers.is_ready else "the workers are being started: try again"
