"""How many of a request's missing tokens go into one step."""

from dataclasses import dataclass

from proto.config import SchedulerConfig


@dataclass(frozen=True)
class ChunkRule:
    """The token limits of a step.

    step_budget: tokens of a whole step.
    longest_chunk: most tokens of one request in a step.
    chunked: whether a prompt may be spread over several steps. Without it a prompt
        waits for a step with room for all of it; one that is longer than any step
        is spread all the same, because nothing else could ever compute it.
    """

    step_budget: int
    longest_chunk: int
    chunked: bool

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> "ChunkRule":
        budget = config.step_tokens
        threshold = config.long_prefill_token_threshold or budget
        return cls(budget, min(threshold, budget), config.enable_chunked_prefill)

    def first_chunk(self, num_missing: int, budget: int) -> int:
        """Tokens for a request that is about to be admitted; 0 when it has to wait."""
        if not self.chunked and budget < num_missing <= self.step_budget:
            return 0
        return min(num_missing, self.longest_chunk, budget)
