"""Engines on a virtual clock: the real scheduler and KV cache, and a model fitted to them."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final, Protocol

import msgspec
import numpy as np

from api_server.engine.router import EngineLoad
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.result import ends_of_rows
from engine_core.scheduler.scheduler import Scheduler
from proto.codec import changed
from proto.messages.engine_io import NO_AGENT, AgentHint
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import SchedulerConfig
from tests.benchmarks.agents import Machine
from tests.benchmarks.fleet.traffic import (
    BLOCK_SIZE,
    LONGEST_TURN,
    MAX_CONTEXT,
    MEAN_CONTEXT,
    TurnRequest,
)
from tests.benchmarks.simulator.messages import StepModel
from tests.benchmarks.simulator.recording import VOCAB_SIZE
from tests.benchmarks.simulator.rig import EPOCH, ReplayWorker
from tests.benchmarks.simulator.simulation import least_squares

LONGEST_PLAN: Final = 1.0
"""Seconds of equal steps after which an engine reports statistics, as one that is not stalled."""


def faster(machine: Machine, factor: int) -> Machine:
    """Return a machine whose steps take a part of the time, with room for more tokens."""
    terms = msgspec.structs.asdict(machine.step_model)
    model = StepModel(**{name: term / factor for name, term in terms.items()})
    budget = machine.max_num_batched_tokens * factor
    return replace(machine, step_model=model, max_num_batched_tokens=budget)


def without_context(machine: Machine) -> Machine:
    """Return a machine whose rows all take as long as one of MEAN_CONTEXT tokens."""
    model = machine.step_model
    per_row = model.per_row_ms + model.per_context_ms * MEAN_CONTEXT
    return replace(machine, step_model=changed(model, per_row_ms=per_row, per_context_ms=0.0))


def prefill_rate(machine: Machine) -> float:
    """Return the tokens of prompts that an engine computes in a second, without decodes."""
    number = machine.max_num_batched_tokens
    return number / machine.step_model.seconds(number, 1, number)


@dataclass(frozen=True)
class StepSample:
    """A step: its tokens, the turns that have some, and how long it took."""

    num_tokens: int
    num_rows: int
    seconds: float


class SimulatedEngine(Protocol):
    """An engine on a virtual clock, which computes a step, or some equal ones, at a time.

    next_end: second at which that ends; infinite without any.
    """

    next_end: float

    def submit(self, turn: TurnRequest, now: float) -> None:
        """Put a turn into the queue."""
        ...

    def advance(self, now: float) -> list[tuple[TurnRequest, bool]]:
        """End what ends now, and begin the next step.

        Return the turns that got their first token, with False, and those that ended, with True.
        """
        ...

    def load(self, now: float) -> EngineLoad:
        """Return what the engine's statistics say."""
        ...

    def warm(self, turn: TurnRequest) -> None:
        """Compute a turn before the start, in no time."""
        ...


class RealEngine:
    """The scheduler and the KV cache of an engine; a step takes as long as the machine says.

    samples: the steps since the start.
    """

    def __init__(self, machine: Machine, num_blocks: int) -> None:
        self.next_end = inf
        self.samples: list[StepSample] = []
        self._now = 0.0
        self._model = machine.step_model
        config = SchedulerConfig(
            max_num_batched_tokens=machine.max_num_batched_tokens,
            max_num_queued_reqs=0,
            max_num_queued_tokens=0,
        )
        longest_chunk = ChunkRule.from_config(config).longest_chunk
        self._cache = KVCacheManager(
            num_blocks + 1, BLOCK_SIZE, True, bytes(32), longest_chunk=longest_chunk
        )
        self._scheduler = Scheduler(
            config,
            self._cache,
            epoch=EPOCH,
            max_model_len=MAX_CONTEXT + LONGEST_TURN,
            vocab_size=VOCAB_SIZE,
            clock=lambda: self._now,
        )
        self._worker = ReplayWorker()
        self._open: dict[int, tuple[TurnRequest, Request]] = {}
        self._step: tuple[SchedulerOutput, ModelRunnerOutput] | None = None

    def submit(self, turn: TurnRequest, now: float) -> None:
        self._now, session = now, turn.session
        request = Request(
            seq_id=turn.request_id,
            request_id=turn.request_id,
            prompt_token_ids=session.token_ids[: turn.num_tokens],
            sampling_params=SamplingParams(max_tokens=turn.answer),
            hasher=self._cache.hasher,
            arrival_time=now,
            tenant=session.tenant,
            agent=AgentHint(session.name) if session.is_agent else NO_AGENT,
        )
        self._worker.expect(turn.request_id, session.content, 0)
        self._scheduler.add_request(request)
        self._scheduler.queue_limits.count_request(request)
        self._open[turn.request_id] = turn, request
        if self._step is None:
            self._begin_step()

    def advance(self, now: float) -> list[tuple[TurnRequest, bool]]:
        assert self._step is not None
        self._now, events = now, list[tuple[TurnRequest, bool]]()
        for output in self._scheduler.update_from_output(*self._step).get(0, ()):
            turn, request = self._open[output.request_id]
            if output.token_index == 0 and output.new_token_ids:
                turn.num_cached = request.num_cached_tokens
                events.append((turn, False))
            if output.finish_reason is not None:
                del self._open[output.request_id]
                events.append((turn, True))
        self._begin_step()
        return events

    def load(self, now: float) -> EngineLoad:
        scheduler = self._scheduler
        num_queued = scheduler.queue_limits.num_tokens
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return EngineLoad(running, waiting, num_queued, self._cache.usage, now)

    def warm(self, turn: TurnRequest) -> None:
        self.submit(turn, 0.0)
        while self._step is not None:
            self.advance(0.0)
        self.samples.clear()

    def _begin_step(self) -> None:
        scheduler, self._step, self.next_end = self._scheduler, None, inf
        while scheduler.has_work:
            output = scheduler.schedule()
            result = self._worker.answer(output)
            if output.has_result:
                ends = ends_of_rows(output)
                num_tokens = output.total_num_scheduled_tokens
                seconds = self._model.seconds(num_tokens, len(ends), sum(ends))
                self.samples.append(StepSample(num_tokens, len(ends), seconds))
                self._step = output, changed(result, compute_seconds=seconds)
                self.next_end = self._now + seconds
                return
            if not (output.finished_seq_ids or output.preempted_seq_ids):
                return


def fit_steps(samples: Sequence[StepSample]) -> tuple[StepModel, float]:
    """Return step times by tokens and rows alone, and the median error as a share of a step.

    So the time that a row takes has the mean context in it.
    """
    features = np.array([(1, each.num_tokens, each.num_rows) for each in samples], dtype=np.float64)
    measured = 1e3 * np.array([each.seconds for each in samples])
    base, per_token, per_row = least_squares(features, measured).tolist()
    model = StepModel(base_ms=base, per_token_ms=per_token, per_row_ms=per_row)
    expected = features @ np.array((base, per_token, per_row))
    return model, float(np.median(np.abs(expected - measured) / measured))


class ChainCache:
    """A prefix cache: LRU of blocks, kept as lengths of chains.

    All blocks of a chain that are cached were last used with its last turn, and are evicted from
    its end. Blocks of a turn that runs are not evicted.
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = num_blocks
        self._blocks: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_blocks = 0
        self._num_idle = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that turns use."""
        return (self._num_blocks - self._num_idle) / self._capacity

    def acquire(self, turn: TurnRequest) -> int | None:
        """Give a turn blocks for prompt and answer, and return the tokens that are cached.

        None, without blocks, if too few are free or evictable.
        """
        session = turn.session
        own = (session.chain, turn.num_blocks + 1 - session.num_shared)
        wanted, blocks = (*session.shared, own), self._blocks
        num_new = num_taken = 0
        for chain, number in wanted:
            had = blocks.get(chain, 0)
            num_new += max(0, number - had)
            if chain in self._idle:
                num_taken += had
        if self._num_blocks - self._num_idle + num_taken + num_new > self._capacity:
            return None
        found = 0
        for chain, number in wanted:
            found += min(number, blocks.get(chain, 0))
            if blocks.get(chain, 0) < number:
                break
        for chain, number in wanted:
            if chain in self._idle:
                del self._idle[chain]
            self._users[chain] = self._users.get(chain, 0) + 1
            blocks[chain] = max(number, blocks.get(chain, 0))
        self._num_idle -= num_taken
        self._num_blocks += num_new
        self._evict()
        return min(found, (turn.num_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE

    def release(self, turn: TurnRequest) -> None:
        """Keep the full blocks of a turn that has ended, as long as there is room."""
        session = turn.session
        num_own = (turn.num_tokens + turn.answer - 1) // BLOCK_SIZE - session.num_shared
        self._num_blocks += num_own - self._blocks[session.chain]
        self._blocks[session.chain] = num_own
        for chain in (session.chain, *(chain for chain, _ in reversed(session.shared))):
            self._users[chain] -= 1
            if not self._users[chain]:
                del self._users[chain]
                self._idle[chain] = None
                self._num_idle += self._blocks[chain]

    def _evict(self) -> None:
        while (excess := self._num_blocks - self._capacity) > 0:
            chain = next(iter(self._idle))
            number = min(excess, self._blocks[chain])
            self._blocks[chain] -= number
            self._num_blocks -= number
            self._num_idle -= number
            if not self._blocks[chain]:
                del self._blocks[chain], self._idle[chain]


class ModelEngine:
    """A model of an engine: a queue, a prefix cache, and steps whose time depends on their rows.

    A step has a token of each turn that decodes, and tokens of prompts, one after the other, up to
    the budget. Equal steps are computed together, until a turn arrives or ends.
    """

    def __init__(self, machine: Machine, num_blocks: int) -> None:
        self.next_end = inf
        self._model, self._budget = machine.step_model, machine.max_num_batched_tokens
        self._cache = ChainCache(num_blocks)
        self._waiting: deque[TurnRequest] = deque()
        self._num_queued = 0  # tokens
        self._prefilling: deque[tuple[TurnRequest, int]] = deque()  # with the tokens that are left
        self._decoding: list[tuple[int, int, TurnRequest]] = []  # a heap, by the step of the end
        self._num_done = 0  # steps
        self._num_planned = 0
        self._began_at = self._step_seconds = 0.0
        self._chunks: list[int] = []  # of the first prompts, in each planned step

    def submit(self, turn: TurnRequest, now: float) -> None:
        self._waiting.append(turn)
        self._num_queued += turn.num_tokens
        if not self._num_planned:
            self._plan(now)
        elif self._num_planned > 1:  # steps that have not begun may get another row
            begun = max(1, ceil((now - self._began_at) / self._step_seconds))
            self._num_planned = min(self._num_planned, begun)
            self.next_end = self._began_at + self._num_planned * self._step_seconds

    def advance(self, now: float) -> list[tuple[TurnRequest, bool]]:
        events: list[tuple[TurnRequest, bool]] = []
        self._num_done += self._num_planned
        for chunk in self._chunks:
            turn, left = self._prefilling.popleft()
            left -= chunk * self._num_planned
            if left:
                self._prefilling.appendleft((turn, left))
                break
            events.append((turn, False))
            end = self._num_done + turn.answer - 1
            heapq.heappush(self._decoding, (end, turn.request_id, turn))
        while self._decoding and self._decoding[0][0] <= self._num_done:
            turn = heapq.heappop(self._decoding)[2]
            self._cache.release(turn)
            events.append((turn, True))
        self._plan(now)
        return events

    def load(self, now: float) -> EngineLoad:
        num_running = len(self._decoding) + len(self._prefilling)
        usage = self._cache.usage
        return EngineLoad(num_running, len(self._waiting), self._num_queued, usage, now)

    def warm(self, turn: TurnRequest) -> None:
        if self._cache.acquire(turn) is not None:
            self._cache.release(turn)

    def _plan(self, now: float) -> None:
        num_decoding = len(self._decoding)
        budget, self._chunks, self._num_planned = self._budget - num_decoding, [], 0
        for _, left in self._prefilling:
            if budget <= 0:
                break
            self._chunks.append(min(left, budget))
            budget -= self._chunks[-1]
        while budget > 0 and self._waiting:
            turn = self._waiting[0]
            num_cached = self._cache.acquire(turn)
            if num_cached is None:
                break
            self._waiting.popleft()
            self._num_queued -= turn.num_tokens
            turn.num_cached, left = num_cached, turn.num_tokens - num_cached
            self._prefilling.append((turn, left))
            self._chunks.append(min(left, budget))
            budget -= self._chunks[-1]
        num_rows = num_decoding + len(self._chunks)
        if not num_rows:
            self.next_end = inf
            return
        num_tokens = num_decoding + sum(self._chunks)
        self._step_seconds = self._model.seconds(num_tokens, num_rows, 0)
        number = int(LONGEST_PLAN / self._step_seconds)
        if self._chunks:
            left = self._prefilling[0][1]
            number = min(number, (left - 1) // self._chunks[0]) if len(self._chunks) == 1 else 1
        if self._decoding:
            number = min(number, self._decoding[0][0] - self._num_done)
        self._began_at, self._num_planned = now, max(1, number)
        self.next_end = now + self._num_planned * self._step_seconds
