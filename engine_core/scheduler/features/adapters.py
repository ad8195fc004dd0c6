"""Adapters (LoRA) as the scheduler sees them: which the workers hold, and which a step may have.

    AdapterResidency    adapters in the workers' memory; the least recently used one goes first
    AdapterGate         holds a request back while its adapter is loaded, or does not fit

Names, paths and files are unknown here: `engine_core/adapters.py` carries out what
`AdapterResidency.pop_commands` says, and reports when workers have loaded an adapter.

A step has at most max_loras adapters, because the running requests together have no more: a
request is only admitted if its adapter is one of theirs, or if they have fewer. A waiting request
is skipped, and those after it are considered, if and only if all four hold:

    adapters are served
    it has an adapter
    running requests have max_loras adapters
    its own is not among them

So that it does not wait for ever while requests of the running adapters keep arriving, it comes
*first* once it has waited for max_lora_wait_steps steps: then requests of other adapters are held
back until one of the running adapters has no request any more.
"""

from typing import ClassVar, Final, TypeVar

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Candidate, SchedulerFeature
from engine_core.scheduler.features.crash_isolation import CrashIsolation
from engine_core.scheduler.features.pause import Pause
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.lora import AdapterUsage
from proto.messages.stats import LoRAStats
from proto.settings.config import LoRAConfig

Key = TypeVar("Key", int, str)

NO_ADAPTER: Final = 0
"""In place of the id of an adapter."""
MAX_CORRUPTED_NAMES: Final = 64
"""Adapters whose corrupted requests are counted; beyond that, the one whose last such request is
longest ago is forgotten."""


class AdapterResidency:
    """The adapters in the workers' memory, by lora_int_id.

        wanted ─┬─▶ loading ─▶ resident ─▶ evicted
                └─▶ pending ──▲     until there is room

    Adapters of running requests are never evicted, those of waiting requests only for one that
    comes first (`load_first`), or if none of these can run (`make_progress`).

    capacity: adapters that the workers may hold. running: number of running requests by adapter.
    waiting: number of requests that wait for their adapter, by adapter. AdapterGate counts both.
    unnamed: adapters that no request can name any more; they go with their last request.
    retired: ids of adapters that were dropped while they were loaded: their contents need others.
    resident: the least recently used one first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.running: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.unnamed: set[int] = set()
        self.retired: set[int] = set()
        self.resident: dict[int, None] = {}
        self.loading: dict[int, None] = {}
        self._pending: dict[int, None] = {}
        self._num_evicted = 0
        self._load_seconds: list[float] = []
        self._commands: list[tuple[int, bool]] = []

    def want(self, lora_int_id: int) -> bool:
        """Return whether the workers hold an adapter, which is used now; have it loaded if not."""
        if lora_int_id in self.resident:
            del self.resident[lora_int_id]
            self.resident[lora_int_id] = None
            return True
        if lora_int_id not in self.loading:
            self._pending[lora_int_id] = None
            self.begin_loads()
        return False

    def load_now(self, lora_int_id: int) -> None:
        """Load an adapter at once, beyond the capacity if need be, until it is loaded."""
        self._pending.pop(lora_int_id, None)
        if lora_int_id not in self.resident and lora_int_id not in self.loading:
            self._make_room()
            self._begin_load(lora_int_id)

    def begin_loads(self) -> None:
        """Begin to load adapters that wait for room, the first one first, while there is some."""
        while self._pending and self._make_room():
            self._begin_load(next(iter(self._pending)))

    def make_progress(self) -> None:
        """Load the first adapter that waits for room, in place of one that waiting requests have.

        Call it when no request runs or can run. These requests are held back by something else.
        """
        if self._pending and not self.loading:
            self.load_first(next(iter(self._pending)))

    def load_first(self, lora_int_id: int) -> None:
        """Load an adapter that waits for room, in place of any that has no running request."""
        if lora_int_id not in self._pending:
            return
        if not self._make_room():
            others = [other for other in self.resident if other not in self.running]
            if not others:
                return
            self._evict(others[0])
        self._begin_load(lora_int_id)

    def end_load(self, lora_int_id: int, *, succeeded: bool, seconds: float) -> None:
        """Note that all workers have loaded an adapter, or that one could not."""
        if lora_int_id not in self.loading:
            return  # it was forgotten meanwhile
        del self.loading[lora_int_id]
        if succeeded:
            self._load_seconds.append(seconds)
            self.resident[lora_int_id] = None
            is_too_much = len(self.resident) + len(self.loading) > self._capacity  # by `load_now`
            if is_too_much and not self._make_room():
                self._evict(lora_int_id)
        else:
            self._commands.append((lora_int_id, False))  # other ranks may hold it
        self.begin_loads()

    def forget(self, lora_int_id: int) -> None:
        """Drop an adapter that nothing needs any more."""
        self._pending.pop(lora_int_id, None)
        if lora_int_id in self.loading:
            self.retired.add(lora_int_id)
        if lora_int_id in self.loading or lora_int_id in self.resident:
            self.loading.pop(lora_int_id, None)
            self.resident.pop(lora_int_id, None)
            self._commands.append((lora_int_id, False))
            self.begin_loads()

    def begin_worker_epoch(self) -> None:
        """Prepare for workers that hold nothing."""
        self.resident.clear()
        self.loading.clear()
        self._pending.clear()
        self._commands.clear()

    def pop_commands(self) -> list[tuple[int, bool]]:
        """Return adapters to load (True) and to drop (False) since the last call, in order."""
        if not self._commands:
            return self._commands
        commands, self._commands = self._commands, []
        return commands

    def pop_counts(self) -> tuple[int, list[float]]:
        """Return the evictions and the seconds of each load since the last call."""
        counts = self._num_evicted, self._load_seconds
        self._num_evicted, self._load_seconds = 0, []
        return counts

    def _begin_load(self, lora_int_id: int) -> None:
        self._pending.pop(lora_int_id, None)
        self.loading[lora_int_id] = None
        self._commands.append((lora_int_id, True))

    def _make_room(self) -> bool:
        """Evict the least recently used adapter if there is no room; False if none may be."""
        if len(self.resident) + len(self.loading) < self._capacity:
            return True
        for lora_int_id in self.resident:
            if lora_int_id not in self.running and lora_int_id not in self.waiting:
                self._evict(lora_int_id)
                return True
        return False

    def _evict(self, lora_int_id: int) -> None:
        del self.resident[lora_int_id]
        self._num_evicted += 1
        self._commands.append((lora_int_id, False))
        if lora_int_id in self.waiting:
            self._pending[lora_int_id] = None


class AdapterGate(SchedulerFeature):
    """Holds requests back whose adapter is not resident, or does not fit beside those that run.

    residency: which adapters the workers hold. num_unfinished: requests by adapter.
    num_corrupted: by name, requests that ended because their logits were not finite.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_ADAPTER

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        config: LoRAConfig,
        residency: AdapterResidency,
        pause: Pause,
        crash_isolation: CrashIsolation,
    ) -> None:
        self.max_loras = config.max_loras
        self._max_wait_steps = config.max_lora_wait_steps
        self._all_running = lifecycle.running
        self._unblock = lifecycle.unblock
        self._pause = pause
        self._crash_isolation = crash_isolation
        self.num_unfinished: dict[int, int] = {}
        self._names: dict[int, dict[str, int]] = {}  # the same, by the name of the request, too
        self.residency = residency
        self._running, self._num_waiting = residency.running, residency.waiting
        self._step = 0
        self._first = NO_ADAPTER
        # By seq_id, the longest wait first: requests that wait for their adapter, and since which
        # step. They stay until they are admitted, also if they are ready or wait for more.
        self._waits: dict[int, tuple[Request, int]] = {}
        self._parked: dict[int, Request] = {}
        self.num_corrupted: dict[str, int] = {}
        self._newly_corrupted: list[str] = []

    # Life of a request

    def on_request_added(self, request: Request) -> None:
        lora = request.lora_request
        if lora is not None:
            _count(self.num_unfinished, lora.lora_int_id)
            _count(self._names.setdefault(lora.lora_int_id, {}), lora.lora_name)

    def begin_admission(self, plan: StepPlan) -> None:
        """Count the adapters of running requests, and unblock requests whose adapters fit now."""
        running = self._running
        running.clear()
        if not self.num_unfinished:
            return
        for request in self._all_running:
            lora = request.lora_request
            if lora is not None:
                running[lora.lora_int_id] = running.get(lora.lora_int_id, 0) + 1
        assert len(running) <= self.max_loras, "a step may have too many adapters"
        self._step += 1
        self.residency.begin_loads()
        self._first = self._find_first() if self._waits else NO_ADAPTER
        if self._first != NO_ADAPTER:
            self.residency.load_first(self._first)
        if self._parked:
            self._unblock_fitting()

    def end_admission(self, num_ready: int) -> None:
        """Note the end of the admissions of a step. num_ready: waiting requests that may run."""
        if not self._all_running and not num_ready:
            self.residency.make_progress()

    def is_blocked(self, candidate: Candidate) -> bool:
        request = candidate.request
        lora = request.lora_request
        if lora is None:
            return False
        lora_int_id = lora.lora_int_id
        is_resident = self.residency.want(lora_int_id)
        if is_resident and self._fits(lora_int_id):
            return False
        if request.seq_id not in self._waits:
            self._waits[request.seq_id] = request, self._step
            _count(self._num_waiting, lora_int_id)
        self._parked[request.seq_id] = request
        return True

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        lora = request.lora_request
        if lora is not None:
            _count(self._running, lora.lora_int_id)
            self._end_wait(request)

    def on_released(self, request: Request) -> None:
        lora = request.lora_request
        if lora is None:
            return
        self._end_wait(request)
        lora_int_id = lora.lora_int_id
        _uncount(self._names[lora_int_id], lora.lora_name)
        if not _uncount(self.num_unfinished, lora_int_id):
            del self._names[lora_int_id]
            self._running.pop(lora_int_id, None)
            if lora_int_id in self.residency.unnamed:
                self.residency.unnamed.remove(lora_int_id)
                self.residency.forget(lora_int_id)

    # Adapters

    def end_load(self, lora_int_id: int, *, succeeded: bool, seconds: float) -> list[Request]:
        """Note that all workers have loaded an adapter, or that one could not.

        Unblocks the requests that wait for it, and returns them: if the load failed, the caller
        ends them. seconds: that the load took.
        """
        self.residency.end_load(lora_int_id, succeeded=succeeded, seconds=seconds)
        found = self._waiting_for(lora_int_id)
        for request in found:
            if self._parked.pop(request.seq_id, None) is not None:
                self._unblock(request)
        return found

    def begin_worker_epoch(self) -> None:
        """Prepare for workers that hold nothing: requests ask for their adapters again."""
        self.residency.begin_worker_epoch()
        self._running.clear()
        parked, self._parked = self._parked, {}
        for request in parked.values():
            self._unblock(request)

    def count_corrupted(self, request: Request) -> None:
        """Count a request whose logits were not finite for its adapter, if it has one."""
        lora = request.lora_request
        if lora is None:
            return
        number = self.num_corrupted.pop(lora.lora_name, 0)
        if not number:
            self._newly_corrupted.append(lora.lora_name)
        self.num_corrupted[lora.lora_name] = number + 1
        if len(self.num_corrupted) > MAX_CORRUPTED_NAMES:
            del self.num_corrupted[next(iter(self.num_corrupted))]

    def pop_newly_corrupted(self) -> list[str]:
        """Return names whose first corrupted request was counted since the last call."""
        if not self._newly_corrupted:
            return self._newly_corrupted
        names, self._newly_corrupted = self._newly_corrupted, []
        return names

    def pop_stats(self) -> LoRAStats:
        """Return counts since the last call."""
        num_evicted, load_seconds = self.residency.pop_counts()
        return LoRAStats(num_evicted, load_seconds)

    def usage(self, epoch: int) -> AdapterUsage:
        """Return which adapters are used now."""
        running: list[str] = []
        waiting: list[str] = []
        for lora_int_id, names in self._names.items():
            found = running if lora_int_id in self._running else waiting
            found += names
        num_resident, corrupted = len(self.residency.resident), dict(self.num_corrupted)
        return AdapterUsage(epoch, running, waiting, num_resident, corrupted)

    def num_running(self, lora_int_id: int) -> int:
        """Return the running requests of an adapter, as of the last step."""
        return self._running.get(lora_int_id, 0)

    # Internals

    def _find_first(self) -> int:
        """Return the adapter that comes first, because a request has waited for it too long.

        None does during a pause and while a suspect of crashes runs alone: what is held back then
        must not hold back others. Nor does one that is being loaded.
        """
        if self._pause.mode is not None or self._crash_isolation.has_pending_trials:
            return NO_ADAPTER
        for request, since in self._waits.values():
            if self._step - since < self._max_wait_steps:
                return NO_ADAPTER  # those after it have waited less
            lora = request.lora_request
            assert lora is not None
            waits_for_more = request.status.is_blocked and request.status is not self.status
            if not (
                waits_for_more
                or lora.lora_int_id in self._running
                or lora.lora_int_id in self.residency.loading
            ):
                return lora.lora_int_id
        return NO_ADAPTER

    def _fits(self, lora_int_id: int) -> bool:
        """Return whether a request of an adapter may be admitted, as to its adapter.

        The adapter that comes first has a slot reserved, beside those that run.
        """
        running, first = self._running, self._first
        num_running = len(running)
        if lora_int_id == first or first == NO_ADAPTER or first in running:
            return lora_int_id in running or num_running < self.max_loras
        if lora_int_id in running:
            return num_running + 1 <= self.max_loras
        return num_running + 1 < self.max_loras

    def _unblock_fitting(self) -> None:
        """Unblock parked requests whose adapters are resident and fit, for the queue's order."""
        for request in list(self._parked.values()):
            lora = request.lora_request
            assert lora is not None
            if lora.lora_int_id in self.residency.resident and self._fits(lora.lora_int_id):
                del self._parked[request.seq_id]
                self._unblock(request)

    def _waiting_for(self, lora_int_id: int) -> list[Request]:
        if lora_int_id not in self._num_waiting:
            return []
        return [
            request
            for request, _ in self._waits.values()
            if request.lora_request is not None and request.lora_request.lora_int_id == lora_int_id
        ]

    def _end_wait(self, request: Request) -> None:
        wait = self._waits.pop(request.seq_id, None)
        if wait is None:
            return
        self._parked.pop(request.seq_id, None)
        lora = request.lora_request
        assert lora is not None
        _uncount(self._num_waiting, lora.lora_int_id)


def _count(numbers: dict[Key, int], key: Key) -> None:
    numbers[key] = numbers.get(key, 0) + 1


def _uncount(numbers: dict[Key, int], key: Key) -> int:
    """Return the number that is left; a key without any is removed."""
    number = numbers[key] - 1
    if number:
        numbers[key] = number
    else:
        del numbers[key]
    return number
