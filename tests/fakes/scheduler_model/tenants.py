"""Who goes first and who gives way, in the model: urgency, tenants, arrival.

All tenants are here from the start, and nobody is lifted.
"""

from tests.fakes.scheduler_model.sequence import Sequence, Settings

OUTPUT_WEIGHT = 2


class TenantsModel:
    """Owns what each tenant was served, and the order of prompts in the running list."""

    def __init__(
        self, settings: Settings, waiting: list[Sequence], running: list[Sequence]
    ) -> None:
        self.settings = settings
        self.by_priority = settings.by_priority
        self.waiting = waiting
        self.running = running
        self.served: dict[int, int] = {}
        self.admissions = 0
        self.mixed = False

    def line(self) -> list[int]:
        """Handles of all that wait, as they would be admitted if nothing were charged."""
        everyone = sorted(self.waiting, key=lambda each: (*self.rank(each), each.tenant))
        return [each.handle for each in everyone]

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Who comes behind whom, among tenants: urgency, then what the tenant was served."""
        urgency = sequence.order[0] if self.by_priority else 0
        return urgency, self.served[sequence.tenant]

    def first(self, ready: list[Sequence]) -> Sequence | None:
        """Of the first of each tenant the one whose turn it is."""
        firsts: dict[int, Sequence] = {}
        for sequence in ready:
            firsts.setdefault(sequence.tenant, sequence)
        return min(firsts.values(), key=lambda each: (*self.rank(each), each.order), default=None)

    def admit(self, sequence: Sequence, missing: int, number: int) -> None:
        """One begins to run, with so many tokens to compute, some of them in this step."""
        if not sequence.charged:
            self.served[sequence.tenant] += missing
        sequence.charged = True
        sequence.decoding = number == missing
        self.admissions += 1
        sequence.came = self.admissions

    def begin_step(self) -> None:
        """Whoever decodes is charged; whoever has computed its prompt decodes from now on."""
        for sequence in self.running:
            if sequence.decoding:
                self.served[sequence.tenant] += OUTPUT_WEIGHT
            elif sequence.computed + 1 >= len(sequence.tokens):
                sequence.decoding = True

    def line_up(self, head: Sequence | None) -> list[Sequence]:
        """Prompts go to the end of the list, and those that give way to the end of these."""
        prompts = [each for each in self.running if not each.decoding]
        several = self._num_tenants() > 1
        if not several and not (prompts and self.mixed):
            return []
        self.mixed = several
        prompts.sort(key=lambda each: (*self.rank(each), each.came))
        late = []
        if head is not None:
            late = [each for each in prompts if self.rank(each) > self.rank(head)]
            late = [each for each in late if each.tenant != head.tenant]
        in_time = [each for each in prompts if each not in late]
        first = min([*prompts[:1], *([head] if head else [])], key=self.rank, default=None)
        makes_way = self._that_make_way(first, len(prompts)) if first is not None else []
        if makes_way and first in prompts:
            its = [each for each in in_time if each.tenant == first.tenant]
            in_time = its + makes_way + [each for each in in_time if each not in its]
        else:
            late = makes_way + late
        rest = [each for each in self.running if each not in in_time + late]
        self.running[:] = rest + in_time + late
        return late

    def _that_make_way(self, first: Sequence, num_prompts: int) -> list[Sequence]:
        """Decodes of who was served more by all that `first` will be charged for."""
        of = self.settings
        least = self.served[first.tenant] if first in self.running else self._least(first)
        left = min(of.longest_chunk, of.budget - (len(self.running) - num_prompts))
        missing = len(first.tokens) - first.computed
        if left > 0 and -(-missing // left) <= -(-missing // of.longest_chunk) + 1:
            return []
        return [
            each
            for each in self.running
            if each.decoding
            and self.served[each.tenant] > least
            and self.rank(each)[0] >= self.rank(first)[0]
        ]

    def victim(self, candidates: list[Sequence]) -> Sequence:
        last = max(map(self.rank, candidates))
        candidates = [each for each in candidates if self.rank(each) == last]
        if self.by_priority:
            return max(candidates, key=lambda each: each.order)
        return candidates[-1]

    def may_claim(self, sequence: Sequence) -> bool:
        """Whether somebody who runs was served more by all that this one has."""
        most = max((self.served[each.tenant] for each in self.running), default=0)
        return self._num_tenants() > 1 and most > self._least(sequence)

    def claimed(self, sequence: Sequence) -> Sequence | None:
        """Who gives its room to one that waits."""
        urgency, _ = self.rank(sequence)
        candidates = [
            each
            for each in self.running
            if self.served[each.tenant] > self._least(sequence) and self.rank(each)[0] >= urgency
        ]
        return self.victim(candidates) if candidates else None

    def _least(self, sequence: Sequence) -> int:
        return self.served[sequence.tenant] + len(sequence.tokens)

    def _num_tenants(self) -> int:
        return len({each.tenant for each in self.waiting + self.running})
