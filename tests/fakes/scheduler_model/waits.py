"""What waiting requests can start from, in the model, and what they wait for.

A choice waits for the prompt of another one, a prompt for the prefix it shares with one
that is being computed.
"""

from dataclasses import dataclass, field

from tests.fakes.pool_model import PoolModel, Tables
from tests.fakes.scheduler_model.sequence import Sequence, Step

PATIENCE = 8
CROWD = 16


@dataclass
class Start:
    """Tokens that need not be computed, their full blocks, and per group the block they end in."""

    num_tokens: int = 0
    tables: Tables = field(default_factory=list)
    tails: list[int] = field(default_factory=list)


class WaitsModel:
    """Owns who is held. over: families of which one has come to its end."""

    def __init__(self, pool: PoolModel, running: list[Sequence], longest_chunk: int) -> None:
        self.pool = pool
        self.running = running
        self.longest_chunk = longest_chunk
        self.over: set[int] = set()
        self.already_running: list[Sequence] = []
        self.aside: dict[int, list[Sequence]] = {}  # by family, while its prompt is computed
        self.held: dict[Sequence, tuple[Sequence, int]] = {}  # for whom, until it has how much
        self.wanted: dict[Sequence, int] = {}  # by now, if no step was lost

    def is_held(self, sequence: Sequence) -> bool:
        return sequence in self.held or sequence in self.aside.get(sequence.family, ())

    def begin(self, step: Step) -> None:
        """An admission pass begins: let go of those who have waited long enough."""
        self.already_running = list(self.running)
        for sequence, (leader, number) in list(self.held.items()):
            is_lost = leader.computed < self.wanted.get(leader, 0)
            sequence.lost += leader not in self.running or is_lost
            reached = leader.computed + step.planned.get(leader, 0)
            if leader not in self.running or reached >= number or sequence.lost >= PATIENCE:
                del self.held[sequence]
        least = max(1, min(self.longest_chunk, step.budget))
        self.wanted = {each: min(each.computed + least, len(each.tokens)) for each in self.running}
        for family, (first, *_) in list(self.aside.items()):
            if self._longest_fork(first).num_tokens or not self._prompt_is_coming(first):
                del self.aside[family]

    def start_of(self, sequence: Sequence, step: Step) -> Start | None:
        """What it starts from; None if it is held from now on."""
        fork = self._longest_fork(sequence)
        if not fork.num_tokens and self._prompt_is_coming(sequence):
            self.aside.setdefault(sequence.family, []).append(sequence)
            return None
        tables = self.pool.hits(sequence.salt, sequence.tokens)
        start = Start(len(tables[0]) * self.pool.size, tables) if tables else Start()
        if fork.num_tokens and fork.num_tokens >= start.num_tokens:
            start = fork
        return None if self._waits(sequence, start.num_tokens, step) else start

    def forget(self, sequence: Sequence) -> None:
        """It is over, and nobody waits for it any more."""
        self.held.pop(sequence, None)
        self.aside.pop(sequence.family, None)
        for who, (leader, _) in list(self.held.items()):
            if leader is sequence:
                del self.held[who]
                who.lost += 1

    def _siblings(self, sequence: Sequence) -> list[Sequence]:
        """Running choices of the same request, the first choice first."""
        family = [each for each in self.running if each.family == sequence.family]
        return sorted(family, key=lambda each: each.choice)

    def _has_prompt(self, sequence: Sequence) -> bool:
        """Since an earlier step."""
        return sequence in self.already_running and sequence.computed >= sequence.shared

    def _prompt_is_coming(self, sequence: Sequence) -> bool:
        if not sequence.shared or sequence.family in self.over:
            return False
        return not all(map(self._has_prompt, self._siblings(sequence)))

    def _longest_fork(self, sequence: Sequence) -> Start:
        """Of the sibling that shares most computed tokens, if no window has passed them."""
        longest = Start()
        for each in filter(self._has_prompt, self._siblings(sequence)):
            most = min(each.computed, len(sequence.tokens) - 1)
            while each.tokens[:most] != sequence.tokens[:most]:
                most -= 1
            if most > longest.num_tokens:
                tables, tails = self.pool.fork(each.handle, most)
                longest = Start(most, tables, tails) if tables else longest
        return longest

    def _waits(self, sequence: Sequence, found: int, step: Step) -> bool:
        """Hold it for the first one admitted that computes its next block, and maybe more."""
        most = (len(sequence.tokens) - 1) // self.pool.size
        if not self.pool.caching or sequence.lost >= PATIENCE:
            return False
        for leader in sorted(self.running, key=lambda each: each.came):
            reached = leader.computed + step.planned.get(leader, 0)
            if reached >= len(leader.tokens) or reached < found:
                continue
            shared = 0
            while shared < most and self._same_block(sequence, leader, shared):
                shared += 1
            number = shared * self.pool.size
            if number > reached and number - found >= max(1, self.longest_chunk // CROWD):
                self.held[sequence] = (leader, number)
                return True
        return False

    def _same_block(self, one: Sequence, other: Sequence, number: int) -> bool:
        end = (number + 1) * self.pool.size
        if end > len(other.tokens) or one.salt != other.salt:
            return False
        return one.tokens[:end] == other.tokens[:end]
