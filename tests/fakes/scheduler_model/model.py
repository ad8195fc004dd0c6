"""A second scheduler, written for being obvious: lists, searches, no hashes, no memory.

It shares no code with engine_core. What it decides in a step must be what the real
one decides, down to the order of the free blocks.
"""

from collections import deque

from tests.fakes.paged_runner import hashed_token
from tests.fakes.pool_model import PoolModel, Tables
from tests.fakes.scheduler_model.room import RoomModel
from tests.fakes.scheduler_model.sequence import Sequence, Settings, Step
from tests.fakes.scheduler_model.tenants import TenantsModel
from tests.fakes.scheduler_model.waits import Start, WaitsModel

Row = tuple[Sequence, bool]
"""One that a step computes, and whether it samples a token of it."""


class SchedulerModel:
    """Both passes over the lists of those that wait and run, and the steps that compute."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = PoolModel(
            settings.num_blocks, settings.block_size, settings.caching, settings.windows
        )
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.in_flight: deque[list[Row]] = deque()
        self.tenants = TenantsModel(settings, self.waiting, self.running)
        self.waits = WaitsModel(self.pool, self.running, settings.longest_chunk)
        self.room = RoomModel(settings, self.pool, self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.tenants.served.setdefault(sequence.tenant, 0)
        self._sort()

    def remove(self, sequence: Sequence) -> None:
        """It is over or aborted; what is in flight for it comes to nothing."""
        (self.waiting if sequence in self.waiting else self.running).remove(sequence)
        self._release(sequence)
        self.waits.forget(sequence)

    def reset(self) -> None:
        """Between two steps: all blocks and prefixes are given up, and the worker forgets all."""
        for victim in self.running[::-1]:
            self._send_back(victim)
            victim.described = False
        self.pool.found.clear()

    def step(self) -> Step:
        """Decide a step. Then take results in: all, or all but this one's if they overlap."""
        step = Step(self.settings.budget)
        while self.room.too_full():
            self._evict(self.tenants.victim(self.running), step)
        self.tenants.begin_step()
        late = self.tenants.line_up(self._head())
        self._run_running([each for each in self.running if each not in late], step)
        if not step.victims:
            self._run_waiting(step, late)
        self._run_running(late, step)
        self._send(step)
        num_left = 1 if self.settings.overlapped and step.planned else 0
        while len(self.in_flight) > num_left:
            self._take_in(self.in_flight.popleft())
        return step

    def num_unknown(self, sequence: Sequence) -> int:
        """Tokens of it that are being sampled."""
        rows = [row for rows in self.in_flight for row in rows]
        return rows.count((sequence, True))

    # Running

    def _run_running(self, sequences: list[Sequence], step: Step) -> None:
        for sequence in sequences:
            if step.budget == 0:
                break
            if sequence not in self.running:
                continue
            # Nothing follows the last token that it may have, so it is never computed.
            num_ahead = min(len(sequence.tokens) + self.num_unknown(sequence), sequence.end - 1)
            number = min(num_ahead - sequence.computed, self.settings.longest_chunk, step.budget)
            if number <= 0:
                continue
            while self._allocate(sequence, number, []) is None:
                if step.hits:
                    break  # somebody was admitted in this step
                victim = self.tenants.victim(self.running)
                self._evict(victim, step)
                if victim is sequence:
                    break
            else:
                step.planned[sequence] = number
                step.budget -= number

    def _evict(self, victim: Sequence, step: Step) -> None:
        """Preempt one; tokens that were planned for it go back to the budget."""
        if victim in step.planned:
            step.budget += step.planned.pop(victim)
            self.pool.withdraw(victim.handle, victim.computed)
        self._send_back(victim)
        step.victims.append(victim.handle)

    def _send_back(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.computed = 0
        self.waiting.insert(0, victim)
        self._sort()

    # Waiting

    def _run_waiting(self, step: Step, late: list[Sequence]) -> None:
        self.waits.begin(step)
        while step.budget and (sequence := self._head()) is not None:
            if not self._has_seat() and not self._may_claim(sequence):
                break
            start = self.waits.start_of(sequence, step)
            if start is None:
                continue
            if self._gives_way(sequence, step, late):
                break
            if self._has_seat():
                number = self._first_chunk(len(sequence.tokens) - start.num_tokens, step.budget)
                if number == 0:
                    break
                if self._admit(sequence, start, number, step):
                    continue
            if not self._claim(sequence, step):
                break

    def _head(self) -> Sequence | None:
        return self.tenants.first([each for each in self.waiting if not self.waits.is_held(each)])

    def _has_seat(self) -> bool:
        return len(self.running) < min(self.settings.seats, self.settings.budget)

    def _gives_way(self, sequence: Sequence, step: Step, late: list[Sequence]) -> bool:
        """It lacks a token that is being sampled, lost its blocks just now, or is not ahead."""
        if self.num_unknown(sequence) or sequence.handle in step.victims:
            return True
        return bool(late) and self.tenants.rank(sequence) >= min(map(self.tenants.rank, late))

    def _first_chunk(self, missing: int, budget: int) -> int:
        if not self.settings.chunked and budget < missing <= self.settings.budget:
            return 0
        return min(missing, self.settings.longest_chunk, budget)

    def _admit(self, sequence: Sequence, start: Start, number: int, step: Step) -> bool:
        if not self.room.admits(sequence, start, number):
            return False
        sequence.computed = start.num_tokens
        new = self._allocate(sequence, number, start.tables)
        if new is None:
            sequence.computed = 0
            return False
        for tail, blocks in zip(start.tails, new, strict=False):
            if tail:
                step.copies += [tail, blocks[0]]
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.tenants.admit(sequence, len(sequence.tokens) - start.num_tokens, number)
        sequence.lost = 0
        step.planned[sequence] = number
        step.hits[sequence.handle] = start.num_tokens
        step.budget -= number
        return True

    def _may_claim(self, sequence: Sequence) -> bool:
        return not self.num_unknown(sequence) and self.tenants.may_claim(sequence)

    def _claim(self, sequence: Sequence, step: Step) -> bool:
        """Have somebody give way to one that waits, unless somebody was admitted already."""
        if step.hits or not self._may_claim(sequence):
            return False
        victim = self.tenants.claimed(sequence)
        if victim is not None:
            self._evict(victim, step)
        return victim is not None

    # Results

    def _send(self, step: Step) -> None:
        """A result names those that are new to the worker first, and those that came back last."""
        rows: list[Row] = []
        for sequence in sorted(
            step.planned, key=lambda each: (each.described, each.handle in step.hits)
        ):
            sequence.described = True
            sequence.computed += step.planned[sequence]
            samples = sequence.computed == len(sequence.tokens) + self.num_unknown(sequence)
            rows.append((sequence, samples))
        self.in_flight.append(rows)

    def _take_in(self, rows: list[Row]) -> None:
        for sequence, samples in rows:
            if samples and (sequence in self.running or sequence in self.waiting):
                sequence.tokens.append(hashed_token(sequence.tokens, sequence.choice))
                if sequence.is_over:
                    self.waits.over.add(sequence.family)
                    self.remove(sequence)

    # Blocks and order

    def _allocate(self, sequence: Sequence, number: int, hits: Tables) -> Tables | None:
        return self.pool.allocate(
            *(sequence.handle, sequence.salt, sequence.tokens),
            *(sequence.computed, number, 0, hits),
        )

    def _release(self, sequence: Sequence) -> None:
        verified = sequence.tokens[: sequence.computed]
        self.pool.release(sequence.handle, sequence.salt, verified)

    def _sort(self) -> None:
        if self.settings.by_priority:
            self.waiting.sort(key=lambda each: each.order)
