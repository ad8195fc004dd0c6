"""What must be free for one more, in the model, beyond blocks for its first tokens."""

from tests.fakes.pool_model import PoolModel, most_blocks
from tests.fakes.scheduler_model.sequence import Sequence, Settings
from tests.fakes.scheduler_model.waits import Start


class RoomModel:
    """Thresholds of occupancy, whole prompts, watermark. Nothing is asked while nobody runs.

    open: whether the occupancy was last, in any step, below where admission goes on, or above
    where it stops.
    """

    def __init__(self, settings: Settings, pool: PoolModel, running: list[Sequence]) -> None:
        self.settings = settings
        self.pool = pool
        self.running = running
        self.usable = settings.num_blocks - 1
        self.open = True

    def too_full(self) -> bool:
        """Somebody is to give way before anything is planned; asked in every step."""
        in_use = self._in_use()
        return len(self.running) > 1 and in_use > self._part(self.settings.preempt_above)

    def admits(self, sequence: Sequence, start: Start, number: int) -> bool:
        if not self.running:
            return True
        needed = self.pool.num_needed(sequence.handle, start.num_tokens + number, start.tables)
        in_use = self._in_use()
        if not self.open or in_use + needed > self._part(self.settings.preempt_above):
            return False
        free = len(self.pool.free)
        if self.settings.whole_prompts and self._to_come(sequence, start) > free:
            return False
        return needed + int(self._part(self.settings.watermark)) <= free

    def _in_use(self) -> int:
        in_use = self.usable - len(self.pool.free)
        if in_use > self._part(self.settings.stop_above):
            self.open = False
        elif in_use < self._part(self.settings.resume_below):
            self.open = True
        return in_use

    def _part(self, fraction: float) -> float:
        return fraction * self.usable

    def _to_come(self, sequence: Sequence, start: Start) -> int:
        """Blocks for all known tokens of this one, and of those whose prompts are computed."""
        prompts = [each for each in self.running if len(each.tokens) - each.computed > 1]
        to_come = [self._whole(each, Start()) for each in prompts]
        return sum(to_come) + self._whole(sequence, start)

    def _whole(self, sequence: Sequence, start: Start) -> int:
        num_tokens, of = len(sequence.tokens), self.settings
        needed = self.pool.num_needed(sequence.handle, num_tokens, start.tables)
        return min(needed, most_blocks(of.windows, of.block_size, num_tokens, of.longest_chunk))
