"""A second scheduler, written for being obvious: lists, searches, no hashes, no memory.

It shares no code with engine_core. What it decides in a step must be what the real
one decides, down to the order of the free blocks.
"""

from dataclasses import dataclass, field

from tests.fakes.paged_runner import hashed_token

LONGEST_WAIT = 64


@dataclass(eq=False)
class Sequence:
    """One choice of a family; `order` decides under PRIORITY.

    decoding: it was seen with no more than a token to compute. came: when it was last admitted.
    """

    handle: int
    tokens: list[int]
    max_tokens: int
    order: tuple[int, ...]
    choice: int = 0
    family: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    waited: int = 0
    described: bool = False
    tenant: int = 0
    decoding: bool = False
    came: int = 0
    charged: bool = False

    def __post_init__(self) -> None:
        self.end = len(self.tokens) + self.max_tokens
        self.shared = len(self.tokens) - 1


@dataclass
class Decision:
    """A step: handles of victims in order; tokens by handle, what the admitted did not compute.

    copies: source and copy of each block that the end of a shared prompt is in.
    """

    victims: list[int] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)


class SchedulerModel:
    """Pool, queue and both passes. Tenants are all here from the start, and nobody is lifted."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        caching: bool,
        budget: int,
        longest: int,
        chunked: bool,
        seats: int,
        by_priority: bool,
    ) -> None:
        self.size = block_size
        self.caching = caching
        self.step_budget = budget
        self.longest = min(longest or budget, budget)
        self.chunked = chunked
        self.seats = seats
        self.by_priority = by_priority
        self.free = list(range(1, num_blocks))
        self.known: list[tuple[tuple[int, ...], int]] = []
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.held: dict[Sequence, tuple[Sequence, int]] = {}
        self.over: set[int] = set()  # families of which one has come to its end
        self.served: dict[int, int] = {}
        self.aside: dict[int, list[Sequence]] = {}  # by family, while its prompt is computed
        self.admissions = 0
        self.mixed = False

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.served.setdefault(sequence.tenant, 0)
        self._sort()

    @property
    def line(self) -> list[int]:
        """Handles of all that wait, as they would be admitted if nothing were charged."""
        key = lambda each: (*self._rank(each), each.tenant)  # noqa: E731
        return [each.handle for each in sorted(self.waiting, key=key)]

    def remove(self, handle: int) -> None:
        """A sequence is over or aborted."""
        for sequence in self.waiting + self.running:
            if sequence.handle == handle:
                (self.waiting if sequence in self.waiting else self.running).remove(sequence)
                self._release(sequence)
                self.held.pop(sequence, None)
                self.aside.pop(sequence.family, None)
                self.held = {who: why for who, why in self.held.items() if why[0] is not sequence}

    def step(self) -> Decision:
        decision = Decision()
        planned: dict[Sequence, int] = {}
        self._charge_decodes()
        late = self._line_up()
        in_time = [each for each in self.running if each not in late]
        budget = self._run_running(in_time, decision, planned, self.step_budget)
        if not decision.victims:
            budget = self._run_waiting(decision, planned, budget, late)
        self._run_running(late, decision, planned, budget)
        decision.tokens = {each.handle: number for each, number in planned.items()}
        for sequence, number in planned.items():
            sequence.computed += number
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(hashed_token(sequence.tokens, sequence.choice))
        # A result names the sequences that are new to the worker first.
        for sequence in sorted(planned, key=lambda each: each.described):
            sequence.described = True
            if len(sequence.tokens) == sequence.end:
                self.over.add(sequence.family)
                self.remove(sequence.handle)
        return decision

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        """Who comes behind whom, among tenants: urgency, then what the tenant was served."""
        urgency = sequence.order[0] if self.by_priority else 0
        return urgency, self.served[sequence.tenant]

    @property
    def _num_tenants(self) -> int:
        return len({each.tenant for each in self.waiting + self.running})

    def _charge_decodes(self) -> None:
        for sequence in self.running:
            if sequence.decoding:
                self.served[sequence.tenant] += 2
            elif sequence.computed + 1 >= len(sequence.tokens):
                sequence.decoding = True

    def _line_up(self) -> list[Sequence]:
        """Prompts go to the end of the list, and those that give way to the end of these."""
        prompts = [each for each in self.running if not each.decoding]
        several = self._num_tenants > 1
        if not prompts or not (several or self.mixed):
            return []
        self.mixed = several
        prompts.sort(key=lambda each: (*self._rank(each), each.came))
        head = self._head()
        late = []
        if head is not None:
            late = [each for each in prompts if self._rank(each) > self._rank(head)]
            late = [each for each in late if each.tenant != head.tenant]
        in_time = [each for each in prompts if each not in late]
        self.running = [each for each in self.running if each.decoding] + in_time + late
        return late

    def _head(self) -> Sequence | None:
        """The first of each tenant that is not held; of these the one whose turn it is."""
        firsts: dict[int, Sequence] = {}
        for sequence in self.waiting:
            aside = self.aside.get(sequence.family, ())
            if sequence not in self.held and sequence not in aside:
                firsts.setdefault(sequence.tenant, sequence)
        return min(firsts.values(), key=lambda each: (*self._rank(each), each.order), default=None)

    def _victim(self, candidates: list[Sequence]) -> Sequence:
        last = max(map(self._rank, candidates))
        candidates = [each for each in candidates if self._rank(each) == last]
        if self.by_priority:
            return max(candidates, key=lambda each: each.order)
        return candidates[-1]

    def _may_claim(self, sequence: Sequence) -> bool:
        most = max((self.served[each.tenant] for each in self.running), default=0)
        return self._num_tenants > 1 and most > self.served[sequence.tenant] + len(sequence.tokens)

    def _claim(
        self, sequence: Sequence, decision: Decision, planned: dict[Sequence, int]
    ) -> int | None:
        """Preempt somebody for one that waits; tokens that come free, None for nobody."""
        if decision.hits or not self._may_claim(sequence):
            return None
        least = self.served[sequence.tenant] + len(sequence.tokens)
        urgency = self._rank(sequence)[0]
        candidates = [
            each
            for each in self.running
            if self.served[each.tenant] > least and self._rank(each)[0] >= urgency
        ]
        if not candidates:
            return None
        return self._evict(self._victim(candidates), decision, planned)

    def _evict(self, victim: Sequence, decision: Decision, planned: dict[Sequence, int]) -> int:
        """Preempt one; returns the tokens that were planned for it."""
        tokens = 0
        if victim in planned:
            tokens = planned.pop(victim)
            never_filled = victim.table[victim.computed // self.size :]
            self.known = [each for each in self.known if each[1] not in never_filled]
        self._preempt(victim)
        decision.victims.append(victim.handle)
        return tokens

    def _run_running(
        self,
        sequences: list[Sequence],
        decision: Decision,
        planned: dict[Sequence, int],
        budget: int,
    ) -> int:
        for sequence in sequences:
            if budget == 0:
                break
            if sequence not in self.running:
                continue
            missing = len(sequence.tokens) - sequence.computed
            number = min(missing, self.longest, budget)
            while not self._take(sequence, sequence.computed + number, []):
                if decision.hits:
                    break  # somebody was admitted in this step
                victim = self._victim(self.running)
                budget += self._evict(victim, decision, planned)
                if victim is sequence:
                    break
            else:
                planned[sequence] = number
                budget -= number
        return budget

    def _run_waiting(
        self,
        decision: Decision,
        planned: dict[Sequence, int],
        budget: int,
        late: list[Sequence],
    ) -> int:
        self._let_go(planned)
        already_running = list(self.running)
        for family, (first, *_) in list(self.aside.items()):
            if self._longest_fork(first, already_running)[1] or not self._prompt_is_coming(first):
                del self.aside[family]
        while budget and (sequence := self._head()) is not None:
            has_seat = len(self.running) < self.seats
            if not has_seat and not self._may_claim(sequence):
                break
            already_running = [each for each in already_running if each in self.running]
            hits = self._hits(sequence)
            found = len(hits) * self.size
            table, shared = self._longest_fork(sequence, already_running)
            if not shared and self._prompt_is_coming(sequence):
                self.aside.setdefault(sequence.family, []).append(sequence)
                continue
            tail = 0
            if shared and shared >= found:
                found = shared
                hits = table[: found // self.size]
                tail = table[found // self.size] if found % self.size else 0
            if self._waits(sequence, found // self.size, planned):
                continue
            if sequence.handle in decision.victims:
                break
            if late and self._rank(sequence) >= self._rank(late[0]):
                break
            missing = len(sequence.tokens) - found
            number = min(missing, self.longest, budget)
            if has_seat and not self.chunked and budget < missing <= self.step_budget:
                break
            if not has_seat or not self._take(sequence, found + number, hits):
                freed = self._claim(sequence, decision, planned)
                if freed is None:
                    break
                budget += freed
                continue
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if not sequence.charged:
                self.served[sequence.tenant] += missing
            sequence.charged = True
            sequence.decoding = number == missing
            self.admissions += 1
            sequence.came = self.admissions
            sequence.computed = found
            sequence.waited = 0
            planned[sequence] = number
            decision.hits[sequence.handle] = found
            if tail:
                decision.copies += [tail, sequence.table[len(hits)]]
            budget -= number
        return budget

    def _siblings(self, sequence: Sequence) -> list[Sequence]:
        """Running choices of the same request, the first choice first."""
        family = [each for each in self.running if each.family == sequence.family]
        return sorted(family, key=lambda each: each.choice)

    def _longest_fork(
        self, sequence: Sequence, already_running: list[Sequence]
    ) -> tuple[list[int], int]:
        """The table of the sibling that shares most computed tokens, and how many."""
        longest: tuple[list[int], int] = [], 0
        for each in self._siblings(sequence):
            if each in already_running and each.computed >= each.shared:
                most = min(each.computed, len(sequence.tokens) - 1)
                while each.tokens[:most] != sequence.tokens[:most]:
                    most -= 1
                if most > longest[1]:
                    longest = each.table, most
        return longest

    def _prompt_is_coming(self, sequence: Sequence) -> bool:
        if not sequence.shared or sequence.family in self.over:
            return False
        return bool(self._siblings(sequence))

    def _let_go(self, planned: dict[Sequence, int]) -> None:
        for sequence, (leader, number) in list(self.held.items()):
            sequence.waited += 1
            reached = leader.computed + planned.get(leader, 0)
            if leader not in self.running or reached >= number or sequence.waited >= LONGEST_WAIT:
                del self.held[sequence]

    def _waits(self, sequence: Sequence, found: int, planned: dict[Sequence, int]) -> bool:
        most = (len(sequence.tokens) - 1) // self.size
        if not self.caching or found >= most or sequence.waited >= LONGEST_WAIT:
            return False
        for leader in self.running:
            if leader.computed + planned.get(leader, 0) >= len(leader.tokens):
                continue
            shared = 0
            while shared < most and self._same_block(sequence, leader, shared):
                shared += 1
            if shared > found:
                self.held[sequence] = (leader, shared * self.size)
                return True
        return False

    def _same_block(self, one: Sequence, other: Sequence, number: int) -> bool:
        end = (number + 1) * self.size
        return end <= len(other.tokens) and one.tokens[:end] == other.tokens[:end]

    def _hits(self, sequence: Sequence) -> list[int]:
        blocks: list[int] = []
        for end in range(self.size, len(sequence.tokens), self.size):
            content = tuple(sequence.tokens[:end])
            same = [block for known, block in self.known if known == content]
            if not same:
                break
            blocks.append(same[0])
        return blocks

    def _take(self, sequence: Sequence, num_tokens: int, hits: list[int]) -> bool:
        table = sequence.table or hits
        num_new = max(0, -(-num_tokens // self.size) - len(table))
        free = [block for block in self.free if block not in hits]
        if num_new > len(free):
            return False
        new, self.free = free[:num_new], free[num_new:]
        self.known = [entry for entry in self.known if entry[1] not in new]
        sequence.table = table + new
        cached = {block for _, block in self.known}
        for number, block in enumerate(sequence.table):
            end = (number + 1) * self.size
            if self.caching and end <= num_tokens and block not in cached:
                self.known.append((tuple(sequence.tokens[:end]), block))
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.computed = 0
        self.waiting.insert(0, victim)
        self._sort()

    def _release(self, sequence: Sequence) -> None:
        table, sequence.table = sequence.table, []
        for block in reversed(table):
            if not any(block in each.table for each in self.running):
                self.free.append(block)

    def _sort(self) -> None:
        if self.by_priority:
            self.waiting.sort(key=lambda each: each.order)
