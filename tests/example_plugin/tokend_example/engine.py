"""Parts of the engine."""

import logging
from collections.abc import Iterator, Sequence

from engine_core.kv_cache.outside import EvictionOrder
from engine_core.request import Request
from engine_core.scheduler.features.outside import OutsideFeature
from engine_core.scheduler.queues.outside import SchedulingPolicy
from engine_core.speculation.outside import DraftProposer
from engine_core.speculation.proposer import Draft

logger = logging.getLogger("tokend.example")


class LongestFirst(SchedulingPolicy):
    """The request with the longest prompt first; the one that was admitted last is preempted."""

    def waiting_key(self, request: Request) -> int:
        return -request.num_prompt_tokens

    def preemption_key(self, request: Request) -> int:
        return -request.running_index


class AdmissionLog(OutsideFeature):
    """Logs the order in which requests are admitted."""

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        logger.warning("admitted a prompt of %d tokens", request.num_prompt_tokens)


class MostRecentFirst(EvictionOrder):
    """Evicts the block that became free last."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._blocks: dict[int, None] = {}  # the next one is the last

    def add(self, blocks: Sequence[int]) -> None:
        self._blocks.update(dict.fromkeys(reversed(blocks)))

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem()[0]

    def put_first(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            del self._blocks[block]
            self._blocks[block] = None

    def __iter__(self) -> Iterator[int]:
        return reversed(self._blocks)


class RepeatedToken(DraftProposer):
    """Drafts the last token again."""

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        return Draft([request.all_token_ids[-1]], [0.9], self.name)
